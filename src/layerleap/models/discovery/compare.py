"""When two tensors are the same thing, and how far apart they may be for rounding alone.

In: tensors of one forward pass, or of two. Out: verdicts that scale with the dtype.

Within one pass a value that is handed on is the same to the bit, and one plain operation away
is a few roundings away, element by element. No tolerance is relative to the largest entry of a
tensor: one massive activation would then hide everything else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# How far a row may move between two computations of it, as a share of its length.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def is_same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal to the bit, whether or not one of them lost its batch axis or changed device."""
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return False
    return torch.equal(ours.reshape(theirs.shape), theirs.to(ours.device, ours.dtype))


def is_rounded(ours: Tensor, theirs: Tensor) -> bool:
    """Equal but for a few roundings in each element: one plain operation, done twice."""
    if ours.shape != theirs.shape:
        return False
    ours, exact = ours.double(), theirs.to(ours.device).double()
    allowed = 4 * _eps(theirs) * (ours.abs() + exact.abs()) + 1e-30
    return bool(((ours - exact).abs() <= allowed).all())


def sum_error(total: Tensor, terms: Sequence[Tensor]) -> float:
    """How far `total` is from the sum of `terms`, as a multiple of what rounding explains.

    Rounding of each addition is a share of the terms' magnitudes, element by element.
    """
    exact = torch.stack([term.to(total.device).double() for term in terms])
    allowed = (6 * _eps(total) + 1e-14) * (exact.abs().sum(0) + total.abs().double())
    excess = (exact.sum(0) - total.double()).abs() / allowed.clamp_min(1e-30)
    return excess.amax().nan_to_num(torch.inf, torch.inf).item()


def row_gap(ours: Tensor, theirs: Tensor, *, centre: bool = False) -> float:
    """The largest difference of two rows as a share of the row's length.

    With `centre`, of its length after the mean is taken off: logits of -100 everywhere say
    nothing, and must not hide what the small differences between them say.
    """
    if ours.shape != theirs.shape:
        return float("inf")
    exact = theirs.to(ours.device).double()
    difference = (ours.double() - exact).norm(dim=-1)
    length = (exact - exact.mean(-1, keepdim=True) if centre else exact).norm(dim=-1)
    return (difference / length.clamp_min(1e-30)).amax().nan_to_num(torch.inf, torch.inf).item()


def rounding(like: Tensor) -> float:
    """The row gap that two computations in this dtype may show."""
    return ROUNDING.get(like.dtype, 2e-2)


def _eps(like: Tensor) -> float:
    return torch.finfo(like.dtype if like.is_floating_point() else torch.float32).eps
