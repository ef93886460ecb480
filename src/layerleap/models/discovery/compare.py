"""Comparing tensors: bit-identical, equal up to rounding, and how far apart they are.

In: tensors from one forward pass, or from two. Out: answers that depend on the dtype.

Within one pass, a value that is passed on stays bit-identical, and one plain operation changes it
by a few roundings per element. No tolerance is relative to the largest entry of a tensor, because
one massive activation would then hide everything else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# How far two computations of a row may differ, relative to its norm.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def is_same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """True if both are bit-identical; batch axes may be flattened and devices may differ."""
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return False
    return torch.equal(ours.reshape(theirs.shape), theirs.to(ours.device, ours.dtype))


def is_rounded(ours: Tensor, theirs: Tensor) -> bool:
    """True if each element differs by a few roundings at most, as after one plain operation."""
    if ours.shape != theirs.shape:
        return False
    ours, exact = ours.double(), theirs.to(ours.device).double()
    allowed = 4 * _eps(theirs) * (ours.abs() + exact.abs()) + 1e-30
    return bool(((ours - exact).abs() <= allowed).all())


def sum_error(total: Tensor, terms: Sequence[Tensor]) -> float:
    """The distance of `total` from the sum of `terms`, as a multiple of what rounding explains.

    The rounding error of an addition is proportional to the magnitude of its terms, element by
    element.
    """
    exact = torch.stack([term.to(total.device).double() for term in terms])
    allowed = (6 * _eps(total) + 1e-14) * (exact.abs().sum(0) + total.abs().double())
    excess = (exact.sum(0) - total.double()).abs() / allowed.clamp_min(1e-30)
    return excess.amax().nan_to_num(torch.inf, torch.inf).item()


def row_gap(ours: Tensor, theirs: Tensor, *, centre: bool = False) -> float:
    """The largest difference between two rows, relative to the row's norm.

    With `centre`, relative to the norm after subtracting the mean: a constant offset of all logits
    has no effect and must not hide the small differences between them.
    """
    if ours.shape != theirs.shape:
        return float("inf")
    exact = theirs.to(ours.device).double()
    difference = (ours.double() - exact).norm(dim=-1)
    length = (exact - exact.mean(-1, keepdim=True) if centre else exact).norm(dim=-1)
    return (difference / length.clamp_min(1e-30)).amax().nan_to_num(torch.inf, torch.inf).item()


def rounding(like: Tensor) -> float:
    """The row gap that rounding can cause between two computations in this dtype."""
    return ROUNDING.get(like.dtype, 2e-2)


def _eps(like: Tensor) -> float:
    return torch.finfo(like.dtype if like.is_floating_point() else torch.float32).eps
