"""Where edits act: the modules of a layer, a site or a head, and the rows that positions choose.

In: a wrapped model and the name of a place. Out: what a `Change` needs to act there; and the base
of edits that change whole rows at chosen positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

from torch import Tensor, nn

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings
from layerleap.models.discovery.sites import Site
from layerleap.models.facts import check_number
from layerleap.models.hooks.capture import check_block, check_layer
from layerleap.models.hooks.edit import Edit
from layerleap.models.hooks.rows import Positions, Rows, check_positions
from layerleap.models.transformer import Transformer
from layerleap.models.weights.heads import heads

Side = Literal["in", "out"]


def state_place(transformer: Transformer, layer: int) -> tuple[int, nn.Module, Side]:
    """The block, module and side that give h[layer]; h[0] is what the first block takes."""
    check_layer(transformer, layer)
    if layer == 0:
        return 1, transformer.block(1), "in"
    return layer, transformer.block(layer), "out"


def site_named(transformer: Transformer, block: int, name: str) -> Site:
    """A site by its name; "attn", "cross" and "ffn" are what these parts add to the stream."""
    check_block(transformer, block)
    anatomy = transformer.known_anatomy(block, "its sites cannot be edited")
    if name in anatomy.parts:
        return anatomy.adds[anatomy.parts.index(name)]
    if name not in anatomy.sites:
        known = ", ".join((*anatomy.parts, *anatomy.sites))
        raise BadSettings(f"no site {name!r} in block {block}; expected one of: {known}")
    return anatomy.sites[name]


def site_place(transformer: Transformer, block: int, name: str) -> tuple[int, nn.Module, Side]:
    """The block, module and side of a site."""
    site = site_named(transformer, block, name)
    return block, transformer.site_module(block, site), site.side


def head_place(transformer: Transformer, block: int, head: int) -> tuple[nn.Module, slice]:
    """The output matrix of attention, and the columns of its input that a head gives."""
    attention = heads(transformer, block)
    check_number("head", head, 0, attention.n_heads - 1, f"block {block}")
    module = transformer.model.get_submodule(attention.outputs.path)
    return module, slice(head * attention.d_value, (head + 1) * attention.d_value)


@dataclass(frozen=True)
class RowEdit(Edit):
    """A change of rows at some positions; see the subclasses."""

    # "all", "last", "generated", or numbers counted from the first token of each text.
    positions: Positions = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "positions", check_positions(self.positions))
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise BadSettings(f"{one.name} is {value!r}; expected a finite number")

    def _at_positions(
        self, new: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor, Callable[[], Rows]], tuple[Tensor, int]]:
        """`new`, rows to rows, as the function of a `Change`."""

        def apply(values: Tensor, rows: Callable[[], Rows]) -> tuple[Tensor, int]:
            at = rows().select(self.positions).nonzero()[:, 0].to(values.device)
            if not len(at):
                return values, 0
            return values.index_put((at,), new(values[at]).to(values.dtype)), len(at)

        return apply
