"""What a norm does to a vector, apart from the division by the size of the whole state.

    norm(x) = gain * (x - mean(x) if it centres) / size(x) + shift

Folding a norm into weights keeps gain and centring, which are the same for every state, and leaves
out the size: a common positive factor, so the order of tokens stays.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerleap.models.discovery.sites import is_norm
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Fold:
    """The linear part of a norm."""

    gain: Tensor  # (d_model,), float32 or wider
    centres: bool

    def into_reader(self, rows: Tensor) -> Tensor:
        """Vectors that are multiplied with the norm's output, for use with its input."""
        return self._centred(rows.to(self.gain.dtype) * self.gain)

    def into_writer(self, rows: Tensor) -> Tensor:
        """What the norm makes of vectors that are added to its input."""
        return self._centred(rows.to(self.gain.dtype)) * self.gain

    def _centred(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(-1, keepdim=True) if self.centres else rows


@torch.no_grad()
def norm_gain(norm: nn.Module, like: Tensor, centres: bool) -> tuple[Tensor, Tensor]:
    """The factor of each coordinate (up to a common one) and the shift of a norm or scale.

    `like` is (row, width): its width, dtype and device are used.
    """
    signs = torch.ones_like(like[:1])
    signs[:, 1::2] = -1
    wide = torch.promote_types(like.dtype, torch.float32)
    shift, normed = (norm(x).to(wide) for x in (torch.zeros_like(signs), signs))
    plain = (signs - signs.mean(-1, keepdim=True) if centres else signs).to(wide)
    return ((normed - shift) / plain)[0], shift[0]


@torch.no_grad()
def fold_of(norm: nn.Module, like: Tensor) -> Fold:
    """The linear part of a norm; `like` is (row, width)."""
    wide = torch.promote_types(like.dtype, torch.float32)
    if like.dtype != wide:  # in bfloat16 a constant that is added changes every coordinate
        norm, like = deepcopy(norm).to(wide), like.to(wide)
    steps = torch.linspace(-1, 1, like.shape[1], device=like.device, dtype=wide)[None]
    plain, moved = (norm(x) - norm(torch.zeros_like(x)) for x in (steps, steps + 3))
    # A norm that centres does not notice a constant that is added to all coordinates.
    centres = bool((plain - moved).abs().max() <= 0.02 * plain.abs().max())
    return Fold(norm_gain(norm, like, centres)[0], centres)


def final_fold(transformer: Transformer) -> Fold | None:
    """The norm between the last block and the output matrix; None where there is none."""
    step = transformer.tail[0] if transformer.tail else None
    if step is None or step.kind != "module":
        return None
    norm = transformer.model.get_submodule(step.path)
    weight = next(norm.parameters(), None)
    if not is_norm(norm) or weight is None:
        return None
    return fold_of(norm, weight.new_zeros(1, transformer.d_model))


def fold_reader(transformer: Transformer, norm: str | None, rows: Tensor) -> Tensor:
    """Readers of a norm's output, as readers of its input; unchanged where there is no norm."""
    if norm is None:
        return rows
    return fold_of(transformer.model.get_submodule(norm), rows[:1]).into_reader(rows)


def fold_writer(transformer: Transformer, rows: Tensor) -> Tensor:
    """What the final norm makes of vectors; unchanged where there is none."""
    last = final_fold(transformer)
    return rows if last is None else last.into_writer(rows)
