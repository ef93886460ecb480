"""The places of a patch grid: states, parts, heads or neurons, read and patched alike.

In: a wrapped model and what to patch. Out: `Places`: which layers or blocks there are, what a
capture holds there as (position, unit, width), and the edits that put such values elsewhere. A
state or part is one unit, each head and each neuron is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.edits.patch import Patch, PatchHead, PatchNeuron, PatchSite, PatchState
from layerleap.act.edits.places import site_named
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.sites import Site
from layerleap.models.hooks.capture import Capture, check_block, check_layer
from layerleap.models.transformer import Transformer
from layerleap.models.weights import all_heads, feed_forwards

At = Literal["state", "attn", "ffn", "head", "neuron"]
Values = dict[int, Tensor]  # by layer or block: (position, unit, width)


@dataclass(frozen=True)
class Cell:
    """One patch: a layer or block, positions, and one unit there."""

    row: int
    column: int
    positions: tuple[int, ...]
    unit: int


@dataclass(frozen=True, eq=False)
class Places:
    """Where a grid patches."""

    transformer: Transformer
    at: At
    rows: tuple[int, ...]  # layers for states, else blocks
    sites: dict[int, Site]  # by block, for parts and neurons
    reasons: tuple[str, ...] = ()  # why blocks are left out

    @classmethod
    def of(cls, transformer: Transformer, at: At, layers: Sequence[int] | None) -> "Places":
        """All layers or blocks, or some; blocks without such places are left out, with why."""
        wanted = _wanted(transformer, at, layers)
        if at == "state":
            return cls(transformer, at, tuple(wanted), {})
        sites: dict[int, Site] = {}
        reasons = []
        known: dict[int, Any] = {}
        if at in ("head", "neuron"):
            known = dict(all_heads(transformer) if at == "head" else feed_forwards(transformer))
        for block in wanted:
            own: Any = known.get(block)
            try:
                if isinstance(own, str):
                    raise ModelRefused(own)
                if at == "neuron":
                    sites[block] = own.site
                elif at == "head":
                    sites[block] = Site("", "in")  # `capture` knows where
                else:
                    sites[block] = site_named(transformer, block, at)
            except (ModelRefused, BadSettings) as error:
                reasons.append(str(error))
        if not sites:
            raise ModelRefused(reasons[0])
        return cls(transformer, at, tuple(sites), sites, tuple(dict.fromkeys(reasons)))

    def what(self) -> dict[str, Any]:
        """The arguments of `capture` that read these places."""
        if self.at == "state":
            return {"layers": self.rows}
        if self.at == "head":
            return {"layers": [], "heads": self.rows}
        return {"layers": [], "sites": list(self.sites.items())}

    def values(self, captured: Capture) -> Values:
        """What a capture of one text holds at these places."""
        found = {}
        for row in self.rows:
            if self.at == "head":
                found[row] = captured.heads[row][0]
            elif self.at == "neuron":
                found[row] = captured.sites[row, self.sites[row]][0][:, :, None]
            else:
                state = self.at == "state"
                own = captured.states[row] if state else captured.sites[row, self.sites[row]]
                found[row] = own[0][:, None]
        return found

    def edits(self, cells: Sequence[Cell], donor: Tensor) -> list[Patch]:
        """Patches that put a donor's values into text i for cell i; all cells are of one row."""
        by_unit: dict[int, list[int]] = {}
        for text, cell in enumerate(cells):
            by_unit.setdefault(cell.unit, []).append(text)
        return [self._edit(cells, texts, donor) for texts in by_unit.values()]

    def _edit(self, cells: Sequence[Cell], texts: Sequence[int], donor: Tensor) -> Patch:
        row, unit = cells[texts[0]].row, cells[texts[0]].unit
        places = [(text, position) for text in texts for position in cells[text].positions]
        to = torch.tensor([text for text, _ in places])
        positions = torch.tensor([position for _, position in places])
        values = donor[positions.to(donor.device), unit]
        if self.at == "state":
            return PatchState(row, values, positions, to)
        if self.at == "head":
            return PatchHead(row, unit, values, positions, to)
        if self.at == "neuron":
            return PatchNeuron(row, unit, values, positions, to)
        return PatchSite(row, self.at, values, positions, to)


def _wanted(transformer: Transformer, at: At, layers: Sequence[int] | None) -> list[int]:
    """The layers or blocks that are asked for."""
    every = range(0 if at == "state" else 1, transformer.n_layers + 1)
    if layers is None:
        return list(every)
    if not layers:
        raise BadSettings(f"layers is empty; expected some of {every[0]} to {every[-1]}")
    for layer in layers:
        (check_layer if at == "state" else check_block)(transformer, layer)
    return sorted(set(layers))
