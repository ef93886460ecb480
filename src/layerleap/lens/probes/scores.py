"""How good a task probe is on held-out documents, compared with chance.

In: saturation layers and states of the same rows. Out: `ProbeScores`: balanced accuracy and the
ROC-AUC of each task against the rest, with intervals over documents, p-values and a control.

Null     labels are permuted between rows, all labels of a row together: a label never leaves its
         layer, and the labels of a row stay as similar as they were. Balancing and fitting are then
         repeated. Permuting single labels would be wrong: the layers of a row are correlated, so
         the null distribution would be too narrow.
Control  the states are replaced by random walks without information; it must score at chance.

The p-value is (permutations at least as good + 1) / (permutations + 1).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.lens.intervals import SHARE, all_but_one, finite, groups_of, jackknife, percentiles
from layerleap.lens.probes.cells import By, Cells, CellSampling, ambiguous, cells_of
from layerleap.lens.probes.task import (
    STRENGTH,
    Softmax,
    Space,
    States,
    features,
    require_aligned,
    require_strength,
)
from layerleap.lens.saturation import Saturation
from layerleap.progress import Progress, silent
from layerleap.results.plain import Plain
from layerleap.short_repr import ShortRepr

SAMPLE = 256  # rows used to measure sizes


class RandomStates:
    """A random walk for every row, generated on demand and always the same."""

    def __init__(
        self, documents: Tensor, d_model: int, steps: Tensor, *, seed: int = 0, name: str = "random"
    ) -> None:
        """Walks of given sizes.

        Args:
            documents: (row,) the document of each row.
            steps: (n_layers + 1,) typical size of a coordinate of h[0], then of h[l] - h[l - 1].
        """
        self.documents, self.d_model, self.steps, self.seed = documents, d_model, steps, seed
        self.n_layers = len(steps) - 1
        self.model: dict[str, Any] = {"name": name, "fingerprint": f"random states, seed {seed}"}

    @classmethod
    def like(cls, states: States, *, seed: int = 0) -> "RandomStates":
        """Walks for the rows of `states`, with steps as long as theirs."""
        rows = torch.linspace(0, len(states) - 1, min(SAMPLE, len(states))).round().long()
        layers = [
            states.cells(rows, torch.full_like(rows, layer)) for layer in range(states.n_layers + 1)
        ]
        changes = [layers[0], *(after - before for before, after in pairwise(layers))]
        steps = torch.stack([change.double().square().mean().sqrt() for change in changes])
        name = f"random walks like {states.model.get('name')}"
        return cls(states.documents, states.d_model, steps, seed=seed, name=name)

    def __len__(self) -> int:
        return len(self.documents)

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        """h[layers[i]] of row rows[i]: (cell, d_model)."""
        states = torch.empty(len(rows), self.d_model)
        for row in rows.unique().tolist():
            here = rows == row
            states[here] = self._walk(row)[layers[here]]
        return states

    def _walk(self, row: int) -> Tensor:
        """The walk of one row: (n_layers + 1, d_model)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + row)
        moves = torch.randn(self.n_layers + 1, self.d_model, generator=generator)
        return (moves * self.steps[:, None].float()).cumsum(0)


Row = dict[str, Any]
TRIES = 20  # permutations tried until one can be balanced


@dataclass(frozen=True, eq=False, repr=False)
class HeldOut(ShortRepr):
    """Predictions for cells whose fold the probe was not trained on."""

    cells: Cells
    p: Tensor  # (cell, task)
    documents: Tensor  # (cell,)

    @property
    def predicted(self) -> Tensor:
        """The most probable task, from 1: (cell,)."""
        return self.p.argmax(1) + 1

    def measures(self) -> Tensor:
        """Balanced accuracy, then the AUC of each task: (1 + n_tasks,)."""
        return _measures(self, torch.ones(1, len(self.cells), dtype=torch.float64))[0]

    def intervals(self) -> Tensor:
        """The ends of 95 % intervals over documents: (2, 1 + n_tasks).

        NaN for a measure that needs a task which only one group of documents has.
        """
        weights, sizes = all_but_one(groups_of(self.documents))
        return torch.stack(jackknife(self.measures(), _measures(self, weights), sizes, SHARE))

    def confusion(self) -> list[list[int]]:
        """Counts by [task][predicted task]."""
        n = self.cells.n_tasks
        both = (self.cells.task - 1) * n + self.predicted - 1
        return torch.bincount(both, minlength=n * n).view(n, n).tolist()


def held_out(
    saturation: Saturation,
    states: States,
    sampling: CellSampling | None = None,
    *,
    by: By = "document",
    strength: float = STRENGTH,
    space: Space = "raw",
) -> HeldOut:
    """Cross-validated predictions: each fold is predicted by a probe trained on the others.

    `by` is what is never split between folds; anything but "document" leaks, for demonstration.
    The other arguments are those of `score_probe`.
    """
    require_strength(strength)
    require_aligned(saturation, states)
    cells = cells_of(saturation, sampling or CellSampling(), by)
    x = features(states, cells, space)
    p = torch.empty(len(cells), cells.n_tasks, dtype=torch.float64)
    for fold in range(cells.n_folds):
        out = cells.fold == fold
        fitted = Softmax.fit(x[~out], cells.task[~out], cells.n_tasks, strength)
        p[out] = fitted.probabilities(x[out])
    return HeldOut(cells, p, saturation.documents[cells.row])


def _measures(predictions: HeldOut, weights: Tensor) -> Tensor:
    """Balanced accuracy and AUCs under weights (resample, cell): (resample, 1 + n_tasks)."""
    cells = predictions.cells
    is_task = torch.nn.functional.one_hot(cells.task - 1, cells.n_tasks).double()
    right = (predictions.predicted == cells.task).double()
    recall = (weights * right) @ is_task / (weights @ is_task)
    auc = [_auc(predictions, task, weights) for task in range(1, cells.n_tasks + 1)]
    return torch.stack([recall.mean(1), *auc], 1)


def _auc(predictions: HeldOut, task: int, weights: Tensor) -> Tensor:
    """How often a cell of the task scores higher than a cell of another task: (resample,).

    Pairs are taken within a fold, because each fold has its own probe. Equal scores count half.
    """
    better = torch.zeros(len(weights), dtype=torch.float64)
    pairs = torch.zeros_like(better)
    for fold in range(predictions.cells.n_folds):
        here = (predictions.cells.fold == fold).nonzero()[:, 0]
        levels, place = predictions.p[here, task - 1].unique(return_inverse=True)
        is_task = predictions.cells.task[here] == task
        blank = torch.zeros(len(weights), len(levels), dtype=torch.float64)
        mine = blank.index_add(1, place[is_task], weights[:, here[is_task]])
        others = blank.index_add(1, place[~is_task], weights[:, here[~is_task]])
        better += (mine * (others.cumsum(1) - others / 2)).sum(1)
        pairs += mine.sum(1) * others.sum(1)
    return better / pairs


@dataclass(frozen=True, repr=False)
class ProbeScores(ShortRepr, Plain):
    """The scores as plain values; `rows[0]` is the balanced accuracy, then one row per task."""

    SHOWN: ClassVar[tuple[str, ...]] = ("control_at_chance",)

    rows: tuple[Row, ...]
    confusion: list[list[int]]  # by [task][predicted task]
    layers: tuple[int, ...]
    cells: int
    n_rows: int
    documents: int
    ambiguous: float  # share of (row, layer) that match several tasks; the first counts
    settings: Row

    @property
    def control_at_chance(self) -> bool:
        """True if the control scores at chance; otherwise no score can be trusted.

        The limit is three standard errors: a leak is far outside, chance almost never.
        """
        row = self.rows[0]
        if row["control_low"] is None or row["control_high"] is None:
            return False
        error = (row["control_high"] - row["control_low"]) / (2 * 1.96)
        return abs(row["control"] - row["chance"]) <= 3 * error

    def to_pandas(self) -> Any:
        """One line for the balanced accuracy, and one per task."""
        import pandas

        return pandas.DataFrame(self.rows)

    def summary(self) -> str:
        """The result in one sentence."""
        a, ok = self.rows[0], "at chance, as it must be"
        control = ok if self.control_at_chance else "NOT AT CHANCE: do not trust this probe"
        return (
            f"balanced accuracy {a['value']:.3f} ({a['low']:.3f} to {a['high']:.3f}); chance is "
            f"{a['chance']:.3f}, permuted labels give {a['null']:.3f}, p = {a['p']:.3g} "
            f"({a['permutations']} permutations); walks score {a['control']:.3f}, {control}; "
            f"{self.cells:,} (row, layer) of {self.documents} documents"
        )


def score_probe(
    saturation: Saturation,
    states: States,
    sampling: CellSampling | None = None,
    *,
    strength: float = STRENGTH,
    space: Space = "raw",
    permutations: int = 39,
    progress: Progress = silent,
) -> ProbeScores:
    """Accuracy and AUC on held-out documents, compared with permuted labels and random walks.

    Args:
        saturation: the saturation layers, which give the labels.
        states: the states of the same rows in the same order.
        sampling: which (row, layer) to use.
        strength: inverse of the penalty on coefficients, scikit-learn's C.
        permutations: how often labels are permuted; no p-value is below 1 / (permutations + 1).
    """
    if permutations < 1:
        raise BadSettings(f"{permutations} permutations give no p-value; expected 1 or more")
    sampling = sampling or CellSampling()
    options: dict[str, Any] = {"strength": strength, "space": space}
    real = held_out(saturation, states, sampling, **options)
    walks = RandomStates.like(states, seed=sampling.seed)
    control = held_out(saturation, walks, sampling, **options)
    null: list[Tensor] = []
    generator = torch.Generator().manual_seed(sampling.seed + 1)
    for number in range(1, permutations + 1):
        null.append(_null_measures(generator, saturation, states, sampling, options))
        progress("permuting labels", number, permutations, "times")
    rows, cells = tuple(_table(real, control, torch.stack(null))), real.cells
    counts = len(cells), len(cells.row.unique()), len(real.documents.unique())
    settings = {**asdict(sampling), **options}
    share = ambiguous(saturation, sampling.first_layer)
    return ProbeScores(rows, real.confusion(), cells.layers, *counts, share, settings)


def _null_measures(
    generator: torch.Generator,
    saturation: Saturation,
    states: States,
    sampling: CellSampling,
    options: Mapping[str, Any],
) -> Tensor:
    """The measures of the next permutation whose labels can be balanced; a few cannot.

    Saturation layers are permuted between rows; documents stay.
    """
    for _ in range(TRIES):
        order = torch.randperm(len(saturation.layer), generator=generator)
        permuted = replace(saturation, layer=saturation.layer[order])
        try:
            return held_out(permuted, states, sampling, **options).measures()
        except BadText as error:
            last = error
    raise last


def _table(real: HeldOut, control: HeldOut, null: Tensor) -> Iterator[Row]:
    value = real.measures()
    columns = {
        ("value", "low", "high"): [value, *real.intervals()],
        ("null", "null_low", "null_high"): [null.mean(0), *percentiles(null)],
        ("control", "control_low", "control_high"): [control.measures(), *control.intervals()],
    }
    p = ((null >= value).sum(0) + 1).double() / (len(null) + 1)  # 1/20 must be 0.05, not above
    for place in range(len(value)):
        numbers = {
            key: finite(column[place].item())
            for keys, triple in columns.items()
            for key, column in zip(keys, triple, strict=True)
        }
        measure = {"measure": "AUC" if place else "balanced accuracy", "task": place or None}
        chance = {"chance": 0.5 if place else 1 / real.cells.n_tasks, "p": p[place].item()}
        yield {**measure, **numbers, **chance, "permutations": len(null)}
