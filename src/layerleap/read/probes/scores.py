"""How good a task probe is on documents it has not seen, and what chance alone would give.

In: saturation layers and states of the same rows. Out: `ProbeScores`: balanced accuracy, ROC-AUC
of each task against the rest, with intervals over documents, p-values and a control.

Null     labels are exchanged between rows, those of one row together: a label never leaves its
         layer, and the labels of a row stay as alike as they were. Everything is then done again,
         balancing and fitting included. Exchanging single labels would not do: the layers of a row
         hang together, so chance would look smaller than it is.
Control  the states are replaced by random walks, which know nothing; it must come out at chance.

The p-value is (number of exchanges at least as good + 1) / (number of exchanges + 1).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.progress import Progress, silent
from layerleap.read.metrics import finite, resample
from layerleap.read.probes.cells import By, Cells, CellSampling, ambiguous, cells_of
from layerleap.read.probes.random_states import RandomStates
from layerleap.read.probes.softmax import STRENGTH, Softmax, require_strength
from layerleap.read.probes.task import Space, States, features, require_aligned
from layerleap.read.saturation import Saturation

Row = dict[str, Any]
TAIL = 0.025  # of 95 % intervals
TRIES = 20  # of an exchange of labels, until one can be balanced


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What probes said of cells whose fold they were not trained on."""

    cells: Cells
    p: Tensor  # (cell, task)
    documents: Tensor  # (cell,)

    @property
    def predicted(self) -> Tensor:
        """(cell,) the likeliest task, from 1 on."""
        return self.p.argmax(1) + 1

    def measures(self) -> Tensor:
        """Balanced accuracy, then the AUC of each task: (1 + n_tasks,)."""
        return _measures(self, torch.ones(1, len(self.cells), dtype=torch.float64))[0]

    def intervals(self, resamples: int, seed: int) -> Tensor:
        """Ends of 95 % intervals from resampled documents: (2, 1 + n_tasks)."""
        names, group = self.documents.unique(return_inverse=True)
        drawn = resample(len(names), resamples, seed)
        found = torch.cat([_measures(self, some[:, group]) for some in drawn.split(100)])
        ends = torch.tensor([TAIL, 1 - TAIL], dtype=torch.float64)
        return torch.nanquantile(found, ends, dim=0)

    def confusion(self) -> list[list[int]]:
        """Counts by [task][predicted task]."""
        n = self.cells.n_tasks
        both = (self.cells.task - 1) * n + self.predicted - 1
        return torch.bincount(both, minlength=n * n).view(n, n).tolist()


def held_out(
    saturation: Saturation,
    states: States,
    choice: CellSampling | None = None,
    *,
    by: By = "document",
    strength: float = STRENGTH,
    space: Space = "raw",
) -> HeldOut:
    """Probes of all folds but one, each asked about the one left out.

    Args:
        saturation: where labels come from.
        states: of the same rows in the same order.
        choice: which (row, layer) are taken.
        by: what is never on both sides. Anything but "document" is for showing what goes wrong.
        strength: inverse of the penalty on coefficients, scikit-learn's C.
        space: what is done to a state first.
    """
    require_strength(strength)
    require_aligned(saturation, states)
    cells = cells_of(saturation, choice or CellSampling(), by)
    x = features(states, cells, space)
    p = torch.empty(len(cells), cells.n_tasks, dtype=torch.float64)
    for fold in range(cells.n_folds):
        out = cells.fold == fold
        fitted = Softmax.fit(x[~out], cells.task[~out], cells.n_tasks, strength)
        p[out] = fitted.probabilities(x[out])
    return HeldOut(cells, p, saturation.documents[cells.row])


def _measures(held: HeldOut, weights: Tensor) -> Tensor:
    """(resample, 1 + n_tasks) under weights (resample, cell)."""
    cells = held.cells
    is_task = torch.nn.functional.one_hot(cells.task - 1, cells.n_tasks).double()
    right = (held.predicted == cells.task).double()
    recall = (weights * right) @ is_task / (weights @ is_task)
    auc = [_auc(held, task, weights) for task in range(1, cells.n_tasks + 1)]
    return torch.stack([recall.mean(1), *auc], 1)


def _auc(held: HeldOut, task: int, weights: Tensor) -> Tensor:
    """How often a cell of the task gets more than one of another, both of one fold: (resample,).

    Only within a fold, because each fold has a probe of its own; equal scores count half.
    """
    better = torch.zeros(len(weights), dtype=torch.float64)
    pairs = torch.zeros_like(better)
    for fold in range(held.cells.n_folds):
        here = (held.cells.fold == fold).nonzero()[:, 0]
        levels, place = held.p[here, task - 1].unique(return_inverse=True)
        is_task = held.cells.task[here] == task
        blank = torch.zeros(len(weights), len(levels), dtype=torch.float64)
        mine = blank.index_add(1, place[is_task], weights[:, here[is_task]])
        others = blank.index_add(1, place[~is_task], weights[:, here[~is_task]])
        better += (mine * (others.cumsum(1) - others / 2)).sum(1)
        pairs += mine.sum(1) * others.sum(1)
    return better / pairs


@dataclass(frozen=True)
class ProbeScores:
    """Plain values, ready for a table; `rows[0]` is the accuracy, then one row per task."""

    rows: tuple[Row, ...]
    confusion: list[list[int]]  # by [task][predicted task]
    layers: tuple[int, ...]
    cells: int
    n_rows: int
    documents: int
    ambiguous: float  # share of (row, layer) that several tasks claim; the first was taken
    settings: Row

    @property
    def control_at_chance(self) -> bool:
        """True if nothing was found where nothing is: else the rest cannot be trusted either.

        Three standard errors: a leak is far outside, and chance alone nearly never.
        """
        row = self.rows[0]
        if row["control_low"] is None or row["control_high"] is None:
            return False
        error = (row["control_high"] - row["control_low"]) / (2 * 1.96)
        return abs(row["control"] - row["chance"]) <= 3 * error

    def to_dict(self) -> Row:
        """Plain JSON types."""
        lists = {"rows": [dict(row) for row in self.rows], "layers": list(self.layers)}
        return {**asdict(self), **lists, "control_at_chance": self.control_at_chance}

    def words(self) -> str:
        """What was found, in one sentence."""
        a = self.rows[0]
        kept = "as it must be" if self.control_at_chance else "WHICH IT SHOULD NOT BE: do not trust"
        where = "at chance" if self.control_at_chance else "away from chance"
        return (
            f"balanced accuracy {a['value']:.3f} ({a['low']:.3f} to {a['high']:.3f}) where chance "
            f"gives {a['chance']:.3f} and exchanged labels {a['null']:.3f}, p = {a['p']:.3g} "
            f"({a['permutations']} exchanges); on random walks {a['control']:.3f}, {where} "
            f"{kept}; {self.cells:,} (row, layer) of {self.documents} documents"
        )


def score_probe(
    saturation: Saturation,
    states: States,
    choice: CellSampling | None = None,
    *,
    strength: float = STRENGTH,
    space: Space = "raw",
    permutations: int = 39,
    resamples: int = 1000,
    progress: Progress = silent,
) -> ProbeScores:
    """Accuracy and AUC on unseen documents, against exchanged labels and random walks.

    Args:
        saturation: where labels come from.
        states: of the same rows in the same order.
        choice: which (row, layer) are taken.
        strength: inverse of the penalty on coefficients, scikit-learn's C.
        space: what is done to a state first.
        permutations: how often labels are exchanged; no p-value is below 1 / (permutations + 1).
        resamples: of documents, for intervals.
        progress: told the number of exchanges.
    """
    if permutations < 1:
        raise BadSettings(f"{permutations} permutations give no p-value; 1 or more was wanted")
    choice = choice or CellSampling()
    options: dict[str, Any] = {"strength": strength, "space": space}
    real = held_out(saturation, states, choice, **options)
    walks = RandomStates.like(states, seed=choice.seed)
    control = held_out(saturation, walks, choice, **options)
    null: list[Tensor] = []
    exchanges = _exchanged(saturation, choice.seed)
    for number in range(1, permutations + 1):
        null.append(_measured(exchanges, states, choice, options))
        progress("exchanging labels", number, permutations, "times")
    rows = _table(real, control, torch.stack(null), resamples, choice.seed)
    return ProbeScores(
        tuple(rows), real.confusion(), real.cells.layers, len(real.cells),
        len(real.cells.row.unique()), len(real.documents.unique()),
        ambiguous(saturation, choice.first), {**asdict(choice), **options},
    )  # fmt: skip


def _measured(
    exchanges: Iterator[Saturation],
    states: States,
    choice: CellSampling,
    options: Mapping[str, Any],
) -> Tensor:
    """The measures of the next exchange whose labels can be balanced: some few cannot be."""
    for _ in range(TRIES):
        try:
            return held_out(next(exchanges), states, choice, **options).measures()
        except BadText as error:
            last = error
    raise last


def _exchanged(saturation: Saturation, seed: int) -> Iterator[Saturation]:
    """The saturation layers of other rows, documents as they are; without end."""
    generator = torch.Generator().manual_seed(seed + 1)
    while True:
        order = torch.randperm(len(saturation.layer), generator=generator)
        yield replace(saturation, layer=saturation.layer[order])


def _table(
    real: HeldOut, control: HeldOut, null: Tensor, resamples: int, seed: int
) -> Iterator[Row]:
    value, low_high = real.measures(), real.intervals(resamples, seed)
    nothing, nothing_ends = control.measures(), control.intervals(resamples, seed)
    ends = torch.tensor([TAIL, 1 - TAIL], dtype=torch.float64)
    null_ends = torch.quantile(null, ends, dim=0)
    p = ((null >= value).sum(0) + 1).double() / (len(null) + 1)  # 1/20 must be 0.05, not above
    for place in range(len(value)):
        yield {
            "measure": "AUC" if place else "balanced accuracy",
            "task": place or None,
            "value": value[place].item(),
            "low": finite(low_high[0, place].item()),
            "high": finite(low_high[1, place].item()),
            "chance": 0.5 if place else 1 / real.cells.n_tasks,
            "null": null[:, place].mean().item(),
            "null_low": null_ends[0, place].item(),
            "null_high": null_ends[1, place].item(),
            "p": p[place].item(),
            "permutations": len(null),
            "control": nothing[place].item(),
            "control_low": finite(nothing_ends[0, place].item()),
            "control_high": finite(nothing_ends[1, place].item()),
        }
