"""Edits of whole sites: what attention or the FFN of a block adds, scaled or switched off.

In: a block, the name of a site, and positions. Out: edits for `model.edit`.
"""

from dataclasses import dataclass

import torch

from layerleap.act.edits.places import RowEdit, site_place
from layerleap.models.hooks.edit import Change
from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class ScaleSite(RowEdit):
    """Multiply what is at a site of a block by `factor`.

    "attn", "cross" and "ffn" are what these parts add to the stream; `model.sites(block)` has more.

        with model.edit(ll.edits.ScaleSite(12, "attn", 0.5)):
            ...
    """

    block: int  # 1 to n_layers
    site: str
    factor: float

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the module whose input or output is the site."""
        place = site_place(transformer, self.block, self.site)
        return [Change(*place, self._at_positions(lambda rows: rows * self.factor))]


@dataclass(frozen=True)
class ZeroSite(RowEdit):
    """Set what is at a site of a block to 0: the block goes on without its attention or FFN.

    with model.edit(ll.edits.ZeroSite(12, "attn", positions="last")):
        ...
    """

    block: int  # 1 to n_layers
    site: str

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the module whose input or output is the site."""
        place = site_place(transformer, self.block, self.site)
        return [Change(*place, self._at_positions(torch.zeros_like))]
