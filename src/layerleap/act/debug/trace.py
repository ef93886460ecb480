"""A trace: every cell of a prompt's grid, the selected position first, with and without edits.

In: a recorded prompt, a lens, edits. Out: frames, in the order in which a page wants them:

    meta         the tokens, the positions that are read, the edits in force
    cells        the selected position at all layers, then every fourth layer, then the rest
    saturation   per position, the layer from which the top token is the final one, and where early
                 exit would stop, with the token that it would give there
    done         how long it took

With edits, "after" cells are sent at the positions whose final state changed. In those with
`changed` false the state is the recorded one, bit for bit; only what they are compared with, the
final answer, is another one. Everywhere else nothing changed.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.debug.cells import Cell, CellReader
from layerleap.act.edits.spec import describe
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.rules import TopProbability
from layerleap.lens.lens import Lens
from layerleap.lens.metrics import Reference
from layerleap.lens.vocabulary.tokens import output_label, token_label
from layerleap.memory import rows_at_once
from layerleap.models.hooks.edit import Edit, EditReport
from layerleap.models.hooks.recording import Recording

Side = Literal["before", "after"]
Frame = dict[str, Any]
STEP = 4  # layers of the coarse grid
EXIT = TopProbability(0.9)  # the rule that is shown as an example of early exit


@dataclass(frozen=True, eq=False)
class Rerun:
    """A recorded pass run again with edits; below the lowest edited block nothing changes."""

    lowest: int  # the lowest edited block
    states: dict[int, Tensor]  # by layer, from `lowest` on: (batch, pos, d_model)
    changed: Tensor  # (n_layers + 1, pos): True where a state is not the recorded one, bit for bit
    report: EditReport


@torch.no_grad()
def rerun(recording: Recording, edits: Sequence[Edit]) -> Rerun:
    """Run the blocks from the lowest edited one on, with the edits in force."""
    transformer = recording.transformer
    lowest = min(change.block for edit in edits for change in edit.changes(transformer))
    h = recording.states[lowest - 1]
    states: dict[int, Tensor] = {}
    with transformer.edit(*edits) as report:
        for layer in range(lowest, transformer.n_layers + 1):
            h = states[layer] = recording.run(h, layer - 1, layer)
    changed = torch.zeros(transformer.n_layers + 1, h.shape[1], dtype=torch.bool)
    for layer, state in states.items():
        changed[layer] = (state != recording.states[layer]).any(-1).any(0).cpu()
    return Rerun(lowest, states, changed, report)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt, the positions that are read, and its recorded pass."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    recording: Recording


@dataclass(eq=False)
class Trace:
    """The frames of one prompt through one lens."""

    prompt: Prompt
    reader: CellReader
    selected: int
    rerun: Rerun | None = None
    should_stop: Callable[[], bool] = lambda: False
    _named: set[int] = field(default_factory=set)
    _cells: dict[tuple[Side, int], dict[int, Cell]] = field(default_factory=dict)
    _started: float = field(default_factory=time.perf_counter)

    @property
    def lens(self) -> Lens:
        """The lens that reads the states."""
        return self.reader.lens

    @property
    def n_layers(self) -> int:
        """The last layer."""
        return self.lens.transformer.n_layers

    def frames(self) -> Iterator[Frame]:
        """All frames; ends early if `should_stop` says so."""
        yield self._meta()
        others = [p for p in self.prompt.positions if p != self.selected]
        size = rows_at_once(self.lens.transformer.d_vocab)
        groups = [others[start : start + size] for start in range(0, len(others), size)]
        layers = list(range(self.n_layers, -1, -1))
        coarse = [layer for layer in layers if layer % STEP == self.n_layers % STEP]
        order = coarse + [layer for layer in layers if layer not in coarse]
        # All layers of the selected position fit into one pass of the tail.
        yield from self._group([self.selected], [layers])
        for group in groups:
            yield from self._group(group, [[layer] for layer in order])
        if not self.should_stop():
            yield {"frame": "done", "seconds": time.perf_counter() - self._started}

    def _meta(self) -> Frame:
        transformer = self.lens.transformer
        return {
            "frame": "meta",
            "tokens": [token_label(transformer, id_).to_dict() for id_ in self.prompt.ids],
            "positions": list(self.prompt.positions),
            "layers": list(range(self.n_layers + 1)),
            "selected": self.selected,
            "lens": self.lens.name,
            "edits": [
                {**describe(entry.edit), "applied": bool(entry.passes), "remark": entry.remark}
                for entry in (() if self.rerun is None else self.rerun.report)
            ],
            "lowest": None if self.rerun is None else self.rerun.lowest,
        }

    def _group(self, positions: Sequence[int], batches: Sequence[Sequence[int]]) -> Iterator[Frame]:
        """The cells of some positions, one frame per batch of layers, and their saturation."""
        if self.should_stop():
            return
        before = after = self._answers(self._rows(self.n_layers, positions))
        if self.rerun is not None and self.rerun.changed[self.n_layers, list(positions)].any():
            after = self._answers(self._rows(self.n_layers, positions, self.rerun))
        for layers in batches:
            if self.should_stop():
                return
            yield from self._read(layers, positions, before, after)
        tops = zip(positions, before.top.tolist(), after.top.tolist(), strict=True)
        yield from (self._saturation(*answers) for answers in tops)

    @torch.no_grad()
    def _answers(self, h: Tensor) -> Reference:
        """The model's output after rows of h[n_layers], which readings are compared with."""
        return Reference(self.lens.transformer.logits(h))

    def _rows(self, layer: int, positions: Sequence[int], rerun: Rerun | None = None) -> Tensor:
        states = self.prompt.recording.states if rerun is None else rerun.states
        return states[layer][0, list(positions)]

    def _read(
        self, layers: Sequence[int], positions: Sequence[int], before: Reference, after: Reference
    ) -> Iterator[Frame]:
        """Cells at some layers and positions; `before` and `after` are the final answers."""
        places = [(layer, position) for layer in layers for position in positions]
        logits = self.reader.logits([(layer, self._rows(layer, positions)) for layer in layers])
        yield self._frame("before", self.reader.cells(places, logits, before, before.top))
        if self.rerun is None:
            return
        changed = self.rerun.changed[:, list(positions)]
        if not changed[self.n_layers].any() and not changed[list(layers)].any():
            return
        edited, moved = logits.clone(), [layer for layer in layers if changed[layer].any()]
        if moved:
            rows = [layer in moved for layer, _ in places]
            edited[rows] = self.reader.logits(
                [(layer, self._rows(layer, positions, self.rerun)) for layer in moved]
            )
        cells = self.reader.cells(places, edited, after, before.top, before=logits)
        is_new = changed[list(layers)].flatten()
        is_other = changed[self.n_layers].repeat(len(layers))  # compared with another answer
        sent = [
            cell if new else replace(cell, change=None)
            for cell, new, other in zip(cells, is_new, is_other, strict=True)
            if new or other
        ]
        yield self._frame("after", sent)

    def _frame(self, side: Side, cells: Sequence[Cell]) -> Frame:
        for cell in cells:
            self._cells.setdefault((side, cell.position), {})[cell.layer] = cell
        ids = {index for cell in cells for index, _ in cell.top} - self._named
        self._named |= ids
        names = {index: output_label(self.lens.transformer, index).to_dict() for index in ids}
        rows = [cell.to_dict() for cell in cells]
        return {"frame": "cells", "side": side, "names": names, "cells": rows}

    def _saturation(self, position: int, before: int, after: int) -> Frame:
        """From which layer on the top token is the final one, before and after the edits."""
        cells = self._cells["before", position]
        edited = {**cells, **self._cells.get(("after", position), {})}
        is_edited = self.rerun is not None
        return {
            "frame": "saturation",
            "position": position,
            "before": self._saturated(cells, before),
            "after": self._saturated(edited, after) if is_edited else None,
            "exits": {
                "before": self._exit(cells, before),
                "after": self._exit(edited, after) if is_edited else None,
            },
        }

    def _saturated(self, cells: dict[int, Cell], final: int) -> int:
        layer = self.n_layers
        while layer > 0 and cells[layer - 1].top[0][0] == final:
            layer -= 1
        return layer

    def _exit(self, cells: dict[int, Cell], answer: int) -> dict[str, Any] | None:
        """Where `EXIT` stops below the last layer, and whether it gives the model's answer there.

        A rule looks at one layer only, so it can be sure of a token that later layers replace: then
        the exit is a warning and not an offer.
        """
        layers = range(self.n_layers)
        if not all(math.isfinite(cells[layer].entropy) for layer in layers):
            return None
        rows = [(*cells[layer].top[0], cells[layer].entropy) for layer in layers]
        top, prob, entropy = torch.tensor(rows).T[:, None]
        unknown, row = torch.full_like(prob, torch.nan), torch.zeros(1, dtype=torch.long)
        evidence = Evidence(top.long(), prob, unknown, entropy, unknown, row, row, tuple(layers))
        stops = EXIT.stops(evidence)[0].nonzero()[:, 0]
        if not len(stops):
            return None
        layer = int(stops[0])
        token, transformer = cells[layer].top[0][0], self.lens.transformer
        labels = [output_label(transformer, index).to_dict() for index in (token, answer)]
        return {"layer": layer, "agrees": token == answer, "top": labels[0], "answer": labels[1]}
