"""Which keys a query sees, and what is added to its scores.

In: a boolean mask (True is visible), float masks and position biases, which are added, or plain
causality aligned to the last key. Out: scores of a block with all of it applied; hidden keys are
minus infinity. Masks for fewer heads, texts or queries are broadcast, never copied.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from layerleap.act.topk.blocks import Block
from layerleap.errors import BadSettings


@dataclass(frozen=True, eq=False)
class Visible:
    """What queries see of the keys."""

    is_causal: bool = False
    mask: Tensor | None = None  # boolean
    biases: tuple[Tensor, ...] = ()  # one near the dtype's lowest number hides a key

    def apply(self, scores: Tensor, block: Block, n_queries: int, n_keys: int) -> Tensor:
        """Scores (text x head, group x query, key) of a block with biases, hidden keys at -inf.

        Changes `scores` in place.
        """
        by_head = block.per_head(scores)
        for bias in self.biases:
            part = block.part_of(bias)
            by_head = by_head.add_(part).masked_fill_(is_hidden(part), -torch.inf)
        if self.mask is not None:
            by_head = by_head.masked_fill_(~block.part_of(self.mask), -torch.inf)
        if self.is_causal:
            last = torch.arange(block.queries.start, block.queries.stop, device=scores.device)
            keys = torch.arange(block.n_keys, device=scores.device)
            hidden = keys > (last + n_keys - n_queries)[:, None]
            by_head = by_head.masked_fill_(hidden, -torch.inf)
        return by_head.flatten(2, 3).flatten(0, 1)

    def of_heads(self, heads: list[int]) -> "Visible":
        """The same for some query heads."""

        def part(shared: Tensor) -> Tensor:
            return shared if shared.shape[1] == 1 else shared[:, heads]

        mask = None if self.mask is None else part(self.mask)
        return Visible(self.is_causal, mask, tuple(map(part, self.biases)))

    def biases_at(self, index: Tensor, block: Block) -> Tensor | None:
        """What the biases add to the selected keys (text x head, group x query, k)."""
        places, total = block.per_head(index.clamp_min(0).long()), None
        for bias in self.biases:
            part = block.part_of(bias).expand(*places.shape[:-1], block.n_keys).gather(-1, places)
            total = part if total is None else total + part
        return None if total is None else total.flatten(2, 3).flatten(0, 1)


def check_mask(mask: Tensor, query: Tensor, key: Tensor, name: str) -> Tensor:
    """The mask, cut to the keys there are; an error if it does not fit.

    In a cache of fixed size, a mask may be longer than the keys.
    """
    if not isinstance(mask, Tensor):
        raise BadSettings(
            f"{name} is a {type(mask).__name__}; expected a tensor, as for attn_implementation="
            "'sdpa' or 'eager'"
        )
    shape = (*query.shape[:3], key.shape[2])
    sizes = zip(mask.shape[:3], shape, strict=False)
    if mask.dim() != 4 or mask.shape[3] < shape[3] or any(n not in (1, size) for n, size in sizes):
        raise BadSettings(
            f"{name} has shape {tuple(mask.shape)}; expected {shape}, with 1 where it is shared by "
            "texts, heads or queries"
        )
    if not mask.is_floating_point() and mask.dtype != torch.bool:
        raise BadSettings(f"{name} is {mask.dtype}; expected boolean (True is visible) or float")
    return mask[..., : key.shape[2]]


def visible_from(
    masks: Mapping[str, Tensor | None], query: Tensor, key: Tensor, *, is_causal: bool
) -> Visible:
    """What queries see with these masks and biases by name, each boolean or float."""
    checked = [check_mask(m, query, key, name) for name, m in masks.items() if m is not None]
    boolean = [mask for mask in checked if mask.dtype == torch.bool]
    together = reduce(torch.logical_and, boolean) if boolean else None
    return Visible(is_causal, together, tuple(m for m in checked if m.dtype != torch.bool))


def is_hidden(bias: Tensor) -> Tensor:
    """Where a float mask hides keys.

    Models mask with the lowest number of a dtype, or minus infinity; biases come on top.
    """
    return bias <= torch.finfo(bias.dtype).min / 2
