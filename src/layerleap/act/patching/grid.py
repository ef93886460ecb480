"""Activation patching: a whole grid of layers and positions, or heads, with one call.

In: a wrapped model, a clean and a corrupt prompt, and a metric; or many pairs. Out: `PatchGrid`:
for each cell, the share of the difference between both runs that patching it alone carries.

    denoise   run the corrupt prompt, put in what the clean one had there: is this enough?
    noise     run the clean prompt, put in what the corrupt one had there: is this needed?

Exact cells run the model from the patched block on, as many at once as memory allows; the part
below ran once. The gradient method takes all cells from one pass forward and one back.
"""

import random
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.metrics import Metric
from layerleap.act.patching.pair import Pair, pair_of, pairs_given, repeated
from layerleap.act.patching.places import At, Cell, Places, Values
from layerleap.act.patching.result import (
    PatchGrid,
    mean_grid,
    rank_correlation,
    require_same_columns,
)
from layerleap.arguments import checked
from layerleap.errors import BadSettings
from layerleap.files import read_json, write_json
from layerleap.models.discovery.compare import rounding
from layerleap.models.hooks.recording import record
from layerleap.models.metric import Bound, wide
from layerleap.models.prompts import numbered
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting
from layerleap.stats.tensor_file import require_same_run

How = Literal["denoise", "noise"]
Method = Literal["exact", "gradient"]
STATES = 2**27  # numbers of a recorded batch held at a time: 512 MB in float32
TOKENS = 2048  # of the texts that run at once
SECONDS = 5.0  # between checkpoints
GRADIENT_PASSES = 4  # clean forward, corrupt forward, and back, which is worth two
SAMPLED_ROWS = 8


@checked
@torch.no_grad()
def patch(
    transformer: Transformer,
    clean: Any = None,
    corrupt: Any = None,
    *,
    metric: Any = None,
    pairs: Any = None,
    at: At = "state",
    how: How = "denoise",
    method: Method = "exact",
    positions: Literal["each", "all"] | Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    check: int = 24,
    checkpoint: str | Path | None = None,
    progress: Progress | bool = True,
) -> PatchGrid:
    """Which part of the model carries the difference between two prompts.

        ll.patch(
            model,
            "When Mary and John went to the store, John gave a drink to",
            "When Mary and John went to the store, Mary gave a drink to",
            metric=ll.metrics.logit_difference(" Mary", " John"),
        )

    Args:
        clean: a prompt; see "What may be given" in the API's documentation.
        corrupt: another prompt of as many tokens.
        metric: a value of `ll.metrics`, or a function from logits (text, d_vocab) to numbers.
        pairs: many pairs instead: tuples (clean, corrupt), records with these fields and answer and
            other, or a .jsonl file of records. The grid is then one for all, with intervals.
        at: the "state" of a layer, what "attn" or "ffn" of a block adds, each "head", or each
            "neuron"; exact cells of all neurons take long, so name some layers.
        how: "denoise" patches the clean run into the corrupt one, "noise" the other way round.
        method: "exact", or "gradient": a linear estimate of all cells at once, with its rank
            correlation to some exact ones.
        positions: for states and parts a column for "each" position (the default), or some, or one
            for "all" together. Heads and neurons are patched at all of these together (by default
            at all positions). Negative numbers count from the end.
        layers: some layers (of states) or blocks; all by default.
        check: how many exact cells the gradient method is compared with; 0 for none.
        checkpoint: a file that finished cells are kept in, so that a run that was stopped goes on.
    """
    if (pairs is None) == (clean is None or corrupt is None):
        raise BadSettings("give a clean and a corrupt prompt, or pairs=[...]")
    if pairs is None and metric is None:
        raise BadSettings(
            "there is no metric; give one, such as ll.metrics.logit_difference(' John', ' Mary')"
        )
    if check < 0:
        raise BadSettings(f"check is {check}; expected 0 or more")
    given = [(clean, corrupt, metric)] if pairs is None else list(pairs_given(pairs, metric))
    places = Places.of(transformer, at, layers)
    aligned: list[Pair] = []
    columns: list[int] = []
    for number, one in enumerate(given, 1):
        with numbered(number, len(given), "pair"):
            aligned.append(pair_of(transformer, *one))
            if n := len(aligned[-1].tokens):  # other models know only after a pass
                columns.append(len(_columns(n, positions)))
                if at not in ("head", "neuron") and positions != "all":
                    require_same_columns(columns[0], columns[-1])
    settings: dict[str, Any] = {"at": at, "how": how, "method": method, "layers": list(places.rows)}
    settings |= {"positions": positions if isinstance(positions, str | None) else list(positions)}
    transformer.require_eval()
    transformer.refresh()
    fingerprint = transformer.identity.fingerprint
    about = {
        **settings,
        "model": fingerprint,
        "pairs": [one.ids for one in aligned],
        "metrics": [Bound.of(transformer, one.metric).name for one in aligned],
    }
    grids, kept = [], _Kept(checkpoint, about)
    with reporting(progress) as report, transformer.just_marked(), kept:
        for number, pair in enumerate(aligned, 1):
            phase = "patching" if pairs is None else f"patching pair {number} of {len(aligned)}"

            def told(done: int, total: int, phase: str = phase) -> None:
                report(phase, done, total, "cells")

            with numbered(number, len(aligned), "pair"):
                of_pair = _OnePair(transformer, places, pair, how, positions, number)
                grids.append(of_pair.grid(method, check, kept, told))
    return mean_grid(grids, places.reasons)


class _Kept:
    """Finished cells of a run, in a file if there is one."""

    def __init__(self, path: str | Path | None, about: dict[str, Any]) -> None:
        """What an earlier run left, if it was the same."""
        self.path, self.about = None if path is None else Path(path), about
        self.cells: dict[str, float] = {}
        self.saved = monotonic()
        if self.path is not None and self.path.is_file():
            content = read_json(self.path)
            require_same_run(self.path, content.get("about", {}), about)
            self.cells = dict(content["cells"])

    def put(self, keys: Sequence[str], values: Sequence[float]) -> None:
        """Keep some cells, and write the file now and then."""
        self.cells.update(zip(keys, values, strict=False))  # the last batch may not be full
        if monotonic() - self.saved > SECONDS:
            self._write()

    def _write(self) -> None:
        if self.path is not None and self.cells:
            write_json(self.path, {"about": self.about, "cells": self.cells})
        self.saved = monotonic()

    def __enter__(self) -> "_Kept":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """A finished run needs no file; one that was stopped keeps all its cells."""
        if kind is not None:
            self._write()
        elif self.path is not None:
            self.path.unlink(missing_ok=True)


class _OnePair:
    """The grid of one pair of prompts."""

    def __init__(
        self,
        transformer: Transformer,
        places: Places,
        pair: Pair,
        how: How,
        positions: Any,
        number: int,
    ) -> None:
        self.transformer, self.places, self.pair, self.number = transformer, places, pair, number
        sides = (pair.clean, pair.corrupt)
        self.donor, self.base = sides if how == "denoise" else sides[::-1]
        self.how, self.at, self.positions = how, places.at, positions

    def grid(
        self, method: Method, check: int, kept: _Kept, told: Callable[[int, int], None]
    ) -> PatchGrid:
        """All cells, exactly or from the gradient."""
        values, clean, corrupt = self._read(with_gradients=method == "gradient")
        self.prefix = f"{self.number}:{clean!r}:{corrupt!r}"
        self.names = _columns(self.n_run - self.pair.n_answer, self.positions)
        self.numbers = list(self.names)
        donor, base = values["donor"], values["base"]
        differs = {
            row: self._by_column((donor[row] != base[row]).any(-1)) > 0 for row in self.places.rows
        }
        columns = max(map(len, differs.values()))
        effects = torch.full((len(differs), columns), torch.nan, dtype=torch.float64)
        for number, own in enumerate(differs.values()):
            effects[number, : len(own)] = 0.0  # what is the same in both runs carries nothing
        active = [
            self._cell(row, column)
            for row, own in differs.items()
            for column in own.nonzero()[:, 0].tolist()
        ]
        passes, correlation, checked_cells = 2.0, None, 0
        if method == "gradient":
            passes = float(GRADIENT_PASSES)
            for number, row in enumerate(differs):  # as if the metric were linear in what is there
                apart = donor[row].double() - base[row].double()
                slopes = self._by_column((apart * values["gradient"][row].to(apart)).sum(-1))
                effects[number, : len(slopes)] = slopes
        run = active if method == "exact" else _sample(active, check)
        exact, more = self._exact(run, donor, kept, told)
        at = [self.places.rows.index(cell.row) for cell in run], [cell.column for cell in run]
        if method == "exact":
            effects[at] = torch.tensor(exact, dtype=torch.float64)
        elif run:
            correlation, checked_cells = rank_correlation(effects[at].tolist(), exact), len(run)
        difference = clean - corrupt if self.how == "denoise" else corrupt - clean
        return PatchGrid(
            model=self.transformer.identity.name,
            at=self.at,
            how=self.how,
            method=method,
            metric=self.bound.name,
            layers=self.places.rows,
            columns=self._names(columns),
            tokens=list(self.pair.tokens),
            shares=effects / difference,
            clean=clean,
            corrupt=corrupt,
            passes=passes + more,
            correlation=correlation,
            checked_cells=checked_cells,
            remarks=self.hints,
        )

    def _read(self, *, with_gradients: bool) -> tuple[dict[str, Values], float, float]:
        """What both runs have at the places, the gradient there, and the metric of both."""
        transformer, last = self.transformer, self.transformer.n_layers
        what = self.places.what()
        both = {**what, "layers": [*what["layers"], last]}
        sides = {"clean": self.pair.clean, "corrupt": self.pair.corrupt}
        captured = {side: transformer.capture(own, **both) for side, own in sides.items()}
        ends = {side: own.states[last] for side, own in captured.items()}
        if ends["clean"].shape != ends["corrupt"].shape:
            raise BadSettings(
                f"the inputs have {ends['clean'].shape[1]} and {ends['corrupt'].shape[1]} "
                "positions; expected as many of each"
            )
        self.n_run = ends["clean"].shape[1]  # the prompt, and the answer behind it
        shape = (1, self.n_run)
        first = Bound.of(transformer, self.pair.metric)
        keep = first.keep(self.pair.clean, shape)
        reference = wide(transformer.logits(transformer.rows(ends["clean"], keep)))[None]
        self.bound = Bound.of(transformer, self.pair.metric, reference)
        named = self.pair.metric if isinstance(self.pair.metric, Metric) else None
        self.hints = named.hints(transformer, reference[0, 0]) if named else []
        clean, corrupt = (
            float(self.bound.of_states(self.bound.keep(sides[side], shape), ends[side]))
            for side in ("clean", "corrupt")
        )
        least = rounding(ends["clean"])
        if abs(clean - corrupt) <= least * max(abs(clean), abs(corrupt), least):
            raise BadSettings(
                f"{self.bound.name} is {clean:.6g} for the clean and {corrupt:.6g} for the corrupt "
                "prompt, so there is no difference to explain; choose other prompts or a metric on "
                "which they differ"
            )
        donor, base = ("clean", "corrupt") if self.how == "denoise" else ("corrupt", "clean")
        values = {
            side: self.places.values(captured[own])
            for side, own in (("donor", donor), ("base", base))
        }
        if with_gradients:
            own = transformer.capture(self.base, gradients=self.bound, **both)
            assert own.gradients is not None
            # What both runs end with, times the slope there, bounds what a line can explain.
            apart = (ends[donor] - ends[base]).double().norm()
            if own.gradients.states[last].double().norm() * apart <= least * abs(clean - corrupt):
                other = "noise" if self.how == "denoise" else "denoise"
                raise BadSettings(
                    f"{self.bound.name} is flat at the {base} run, so its gradient there explains "
                    f"nothing; give method='exact', or how={other!r}"
                )
            values["gradient"] = self.places.values(own.gradients)
        return values, clean, corrupt

    def _by_column(self, values: Tensor) -> Tensor:
        """(position, unit) -> (column,), summed over the positions of each."""
        here = values[self.numbers].double()
        by_position = self.at not in ("head", "neuron") and self.positions != "all"
        return here[:, 0] if by_position else here.sum(0)

    def _cell(self, row: int, column: int) -> Cell:
        if self.at in ("head", "neuron"):
            return Cell(row, column, tuple(self.numbers), column)
        numbers = self.numbers if self.positions == "all" else [self.numbers[column]]
        return Cell(row, column, tuple(numbers), 0)

    def _names(self, columns: int) -> list[str]:
        if self.at in ("head", "neuron"):
            return [str(column) for column in range(columns)]
        if self.positions == "all":
            return ["all positions"]
        return list(self.names.values())

    def _exact(
        self,
        cells: Sequence[Cell],
        donor: Values,
        kept: _Kept,
        told: Callable[[int, int], None],
    ) -> tuple[list[float], float]:
        """The change of the metric by each cell, and how many passes of one prompt they took."""
        waiting: dict[int, list[Cell]] = {}
        for cell in cells:
            if self._key(cell) not in kept.cells:
                waiting.setdefault(cell.row, []).append(cell)
        passes, done = 0.0, len(cells) - sum(map(len, waiting.values()))
        if waiting:
            n = self._at_once(max(map(len, waiting.values())))
            arguments = repeated(self.base, n)
            recording = record(self.transformer, arguments)
            keep = self.bound.keep(arguments, (n, self.n_run))
            before = self.bound.of_states(keep, recording.states[-1]).double()
            passes += n
            last = self.transformer.n_layers
            for row, of_row in waiting.items():
                for start in range(0, len(of_row), n):
                    batch = of_row[start : start + n]
                    edits = self.places.edits(batch, donor[row])
                    if self.at == "state":
                        h = recording.states[row]
                        for one in edits:
                            h = one.into(h, recording)  # type: ignore[attr-defined]  # states have it
                        h = recording.run(h, row)
                    else:
                        with self.transformer.edit(*edits):
                            h = recording.run(recording.states[row - 1], row - 1)
                    passes += n * (last - row + (self.at != "state")) / last
                    effects = self.bound.of_states(keep, h).double() - before
                    kept.put([self._key(cell) for cell in batch], effects.tolist())
                    done += len(batch)
                    told(done, len(cells))
        return [kept.cells[self._key(cell)] for cell in cells], passes

    def _key(self, cell: Cell) -> str:
        """Its name in a checkpoint: with another metric, or under edits, it is another cell."""
        return f"{self.prefix}:{cell.row}:{cell.column}"

    def _at_once(self, most: int) -> int:
        """How many cells run at once: as memory allows, in batches of about equal size."""
        size = (self.transformer.n_layers + 1) * self.n_run * self.transformer.d_model
        limit = max(1, min(STATES // size, TOKENS // self.n_run))
        return ceil(most / ceil(most / limit))


def _columns(n: int, positions: Any) -> dict[int, str]:
    """The positions of n that are patched, each once, with the names that they were given."""
    given = range(n) if isinstance(positions, str | None) else positions
    names: dict[int, str] = {}
    for one in given:
        names.setdefault(n + one if one < 0 else one, str(one))
    if any(not 0 <= one < n for one in names) or not names:
        raise BadSettings(f"positions {list(given)}; expected some of 0 to {n - 1}")
    return names


def _sample(cells: Sequence[Cell], n: int) -> list[Cell]:
    """Some cells of a few layers far apart, so that one run serves several of them."""
    rows = sorted({cell.row for cell in cells})
    if not n or not rows:
        return []
    chosen = sorted(
        {
            rows[round(place * (len(rows) - 1) / max(1, SAMPLED_ROWS - 1))]
            for place in range(SAMPLED_ROWS)
        }
    )
    draw = random.Random(0)
    found: list[Cell] = []
    for row in chosen:
        of_row = [cell for cell in cells if cell.row == row]
        found += draw.sample(of_row, min(len(of_row), ceil(n / len(chosen)), n - len(found)))
    return found
