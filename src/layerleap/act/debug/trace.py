"""A trace: every cell of a prompt's grid, the selected position first, with and without edits.

In: a recorded prompt, a lens, edits. Out: frames, in the order in which a page wants them:

    meta         the tokens, the positions that are read, the edits in force
    cells        the selected position at all layers, then every fourth layer, then the rest
    saturation   per position, the layer from which the top token is the final one, and where early
                 exit would stop, with the token that it would give there; see `act.debug.stop`
    done         how long it took

With edits, "after" cells are sent at the positions whose final state changed. In those with
`changed` false the state is the recorded one, bit for bit; only what they are compared with, the
final answer, is another one. Everywhere else nothing changed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from layerleap.act.debug.cells import Answers, Cell, CellReader
from layerleap.act.debug.rerun import Rerun
from layerleap.act.debug.stop import first_stop
from layerleap.act.edits.spec import describe
from layerleap.lens.lens import Lens
from layerleap.lens.vocabulary.tokens import output_label, token_label
from layerleap.memory import rows_at_once
from layerleap.models.hooks.recording import Recording

Side = Literal["before", "after"]
Frame = dict[str, Any]
STEP = 4  # layers of the coarse grid


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt, the positions that are read, and its recorded pass."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    recording: Recording

    def state(self, layer: int, position: int, rerun: Rerun | None = None) -> Tensor:
        """One row of h[layer], of the edited run if there is one."""
        states = self.recording.states if rerun is None else rerun.states
        return states[layer][0, position]


@dataclass(eq=False)
class Trace:
    """The frames of one prompt through one lens."""

    prompt: Prompt
    reader: CellReader
    selected: int
    rerun: Rerun | None = None
    should_stop: Callable[[], bool] = lambda: False
    _named: set[int] = field(default_factory=set)
    _read: dict[tuple[Side, int], dict[int, Cell]] = field(default_factory=dict)
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
            "edits": self._edits(),
            "lowest": None if self.rerun is None else self.rerun.lowest,
        }

    def _edits(self) -> list[dict[str, Any]]:
        if self.rerun is None:
            return []
        return [
            {**describe(applied.edit), "applied": bool(applied.passes), "remark": applied.remark}
            for applied in self.rerun.report
        ]

    def _group(self, positions: Sequence[int], batches: Sequence[Sequence[int]]) -> Iterator[Frame]:
        """The cells of some positions, one frame per batch of layers, and their saturation."""
        if self.should_stop():
            return
        last = self._rows(self.n_layers, positions)
        edited = None if self.rerun is None else self._rows(self.n_layers, positions, self.rerun)
        answers = Answers.of(self.lens, last, edited)
        for layers in batches:
            if self.should_stop():
                return
            yield from self._cells(layers, positions, answers)
        for place, position in enumerate(positions):
            yield self._saturation(
                position, int(answers.before.top[place]), int(answers.after.top[place])
            )

    def _rows(self, layer: int, positions: Sequence[int], rerun: Rerun | None = None) -> Tensor:
        states = self.prompt.recording.states if rerun is None else rerun.states
        return states[layer][0, list(positions)]

    def _cells(
        self, layers: Sequence[int], positions: Sequence[int], answers: Answers
    ) -> Iterator[Frame]:
        finals = answers.before.top
        places = [(layer, position) for layer in layers for position in positions]
        read = self.reader.logits([(layer, self._rows(layer, positions)) for layer in layers])
        yield self._frame("before", self.reader.cells(places, read, answers.before, finals))
        if self.rerun is None:
            return
        changed = self.rerun.changed[:, list(positions)]
        if not changed[self.n_layers].any() and not changed[list(layers)].any():
            return
        after, moved = read.clone(), [layer for layer in layers if changed[layer].any()]
        if moved:
            rows = [layer in moved for layer, _ in places]
            after[rows] = self.reader.logits(
                [(layer, self._rows(layer, positions, self.rerun)) for layer in moved]
            )
        own = self.reader.cells(places, after, answers.after, finals, before=read)
        is_new = changed[list(layers)].flatten()
        is_other = changed[self.n_layers].repeat(len(layers))  # compared with another answer
        yield self._frame(
            "after",
            [
                cell if new else replace(cell, change=None)
                for cell, new, other in zip(own, is_new, is_other, strict=True)
                if new or other
            ],
        )

    def _frame(self, side: Side, cells: Sequence[Cell]) -> Frame:
        for cell in cells:
            self._read.setdefault((side, cell.position), {})[cell.layer] = cell
        ids = {index for cell in cells for index, _ in cell.top} - self._named
        self._named |= ids
        names = {index: output_label(self.lens.transformer, index).to_dict() for index in ids}
        rows = [cell.to_dict() for cell in cells]
        return {"frame": "cells", "side": side, "names": names, "cells": rows}

    def _saturation(self, position: int, before: int, after: int) -> Frame:
        """From which layer on the top token is the final one, before and after the edits."""
        cells = self._read["before", position]
        own = {**cells, **self._read.get(("after", position), {})}
        is_edited = self.rerun is not None
        return {
            "frame": "saturation",
            "position": position,
            "before": self._settled(cells, before),
            "after": self._settled(own, after) if is_edited else None,
            "exits": {
                "before": self._stop(cells, before),
                "after": self._stop(own, after) if is_edited else None,
            },
        }

    def _settled(self, cells: dict[int, Cell], final: int) -> int:
        layer = self.n_layers
        while layer > 0 and cells[layer - 1].top[0][0] == final:
            layer -= 1
        return layer

    def _stop(self, cells: dict[int, Cell], answer: int) -> dict[str, Any] | None:
        stop = first_stop(cells, self.n_layers, answer)
        return None if stop is None else stop.to_dict(self.lens.transformer)
