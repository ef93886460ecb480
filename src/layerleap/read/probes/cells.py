"""Tasks: which rank is being decided at a layer; and an even choice of examples of them.

In: saturation layers, (row, rank). Out: the task of every (row, layer), and `Cells`: a seeded
choice of such pairs in which no layer, on no side of a fold, has more of one task than of another.

The definition is that of "Looking Beyond the Top-1" (arXiv 2410.20210): task i at layer l if
s_{i-1} < l <= s_i. Layer s_i itself belongs to task i: its block is the one that settled rank i.
Balanced like that, the layer says nothing about the task, and neither does a fold.
"""

import heapq
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.read.saturation import Saturation

By = Literal["document", "row", "cell"]
FEWEST = 10  # cells of each task in each fold with which a probe is trained at all

FIRST = 1  # nothing has been computed at layer 0


@dataclass(frozen=True)
class CellSampling:
    """How cells are chosen."""

    tasks: int | None = None  # how many are told apart, the last with all later; None: one per rank
    first: int = FIRST  # the lowest layer
    least: int = 5  # a layer with fewer balanced cells of each task is left out
    folds: int = 5
    limit: int = 6000  # cells in all, which bounds memory
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tasks is not None and self.tasks < 2:
            raise BadSettings(f"tasks {self.tasks} leaves nothing to tell apart; 2 or more")
        for name, least in (("first", 0), ("least", 1), ("folds", 2), ("limit", 1)):
            if getattr(self, name) < least:
                raise BadSettings(f"{name} {getattr(self, name)} is not a number from {least} on")


@dataclass(frozen=True, eq=False)
class Cells:
    """Pairs (row, layer) in rising order, each with its task from 1 on and its fold: (cell,)."""

    row: Tensor
    layer: Tensor
    task: Tensor
    fold: Tensor
    n_tasks: int
    n_folds: int

    def __len__(self) -> int:
        return len(self.row)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have cells."""
        return tuple(self.layer.unique().tolist())


def task_labels(saturation: Saturation, tasks: int | None = None) -> Tensor:
    """The task of every row at every layer: (row, n_layers + 1), 1 to k; 0 once all are settled.

    Ranks that settle out of order can make a layer match several tasks; the first counts: the
    best rank that is not settled yet.

    Args:
        saturation: of the rows.
        tasks: put the tasks from this one on together, those after the last known rank included:
            with 2, "the first rank is open" against "it is settled". None keeps one per rank.
    """
    is_open = _open(saturation)
    k = is_open.shape[-1]
    if tasks is not None and tasks > k:
        raise BadSettings(f"{tasks} tasks were asked for, and the saturation layers have {k} ranks")
    none = 0 if tasks is None else tasks
    label = torch.where(is_open.any(-1), is_open.int().argmax(-1) + 1, none)
    return label.clamp_max(tasks or k).to(torch.int8)


def ambiguous(saturation: Saturation, first: int = FIRST) -> float:
    """The share of labelled (row, layer) from layer `first` on that match several tasks."""
    is_open = _open(saturation)[:, first:]
    settled_before = torch.ones_like(is_open)
    settled_before[..., 1:] = ~is_open[..., :-1]
    matches = (is_open & settled_before).sum(-1)
    return float((matches > 1).sum() / (matches > 0).sum().clamp_min(1))


def _open(saturation: Saturation) -> Tensor:
    """(row, layer, rank): True up to and including the saturation layer."""
    layers = torch.arange(saturation.n_layers + 1)
    return saturation.layer[:, None, :] >= layers[None, :, None]


def folds_of(documents: Tensor, shape: tuple[int, int], n: int, by: By, seed: int) -> Tensor:
    """The fold of every (row, layer): (row, layer), 0 to n - 1.

    Args:
        documents: (row,) which document each row is of.
        shape: (rows, layers).
        n: how many folds.
        by: what is never on both sides: a document, a row, or only a single (row, layer). The
            last is how not to do it: a row's state hardly changes from one layer to the next, and
            neither does its task, so a probe can learn rows by heart. It is here to show that.
        seed: of the random order.
    """
    rows, layers = shape
    if by not in ("document", "row", "cell"):
        raise BadSettings(f"by {by!r} is neither 'document' nor 'row' nor 'cell'")
    units = {
        "document": documents, "row": torch.arange(rows), "cell": torch.arange(rows * layers),
    }[by]  # fmt: skip
    names, group = units.unique(return_inverse=True)
    if len(names) < n:
        raise BadText(f"{len(names)} {by}s cannot be dealt into {n} folds; at least {n} are needed")
    fold = _dealt(torch.bincount(group), n, seed)[group]
    return fold.view(rows, layers) if by == "cell" else fold[:, None].expand(rows, layers)


def _dealt(sizes: Tensor, n: int, seed: int) -> Tensor:
    """The fold of each group: the largest first, equal ones in random order, to the emptiest."""
    shuffled = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    order = shuffled[sizes[shuffled].argsort(descending=True, stable=True)].tolist()
    heap = [(0, fold) for fold in range(n)]
    fold_of = torch.empty(len(sizes), dtype=torch.int64)
    for group in order:
        held, fold = heapq.heappop(heap)
        fold_of[group] = fold
        heapq.heappush(heap, (held + int(sizes[group]), fold))
    return fold_of


def cells_of(saturation: Saturation, choice: CellSampling, by: By = "document") -> Cells:
    """A balanced choice of (row, layer) with their tasks, dealt into folds."""
    labels = task_labels(saturation, choice.tasks)
    folds = folds_of(
        saturation.documents, (labels.shape[0], labels.shape[1]), choice.folds, by, choice.seed
    )
    return choose_cells(labels, folds, choice.tasks or saturation.k, choice)


def choose_cells(labels: Tensor, folds: Tensor, n_tasks: int, choice: CellSampling) -> Cells:
    """As many cells as balance allows: in each layer of each fold the same number of every task.

    Args:
        labels: (row, layer) as `task_labels` gives them.
        folds: (row, layer) as `folds_of` gives them.
        n_tasks: how many tasks there are.
        choice: the rest.
    """
    n_layers = labels.shape[1]
    if choice.first >= n_layers:
        raise BadSettings(f"no layer from {choice.first} on: there are layers 0 to {n_layers - 1}")
    column = torch.arange(n_layers)
    group = ((folds * n_layers + column) * (n_tasks + 1) + labels).flatten()
    shape = (choice.folds, n_layers, n_tasks + 1)
    counts = torch.bincount(group, minlength=shape[0] * shape[1] * shape[2]).view(shape)
    rarest = _rarest(counts, choice)
    _require_enough(counts, rarest, len(labels), choice)
    wanted = _within_limit(rarest, n_tasks, choice)
    random = torch.rand(len(group), generator=torch.Generator().manual_seed(choice.seed))
    order = torch.from_numpy(np.lexsort((random.numpy(), group.numpy())))
    start = counts.flatten().cumsum(0) - counts.flatten()
    place = torch.arange(len(group)) - start[group[order]]  # of a cell within its group
    quota = wanted[:, :, None].repeat(1, 1, n_tasks + 1)
    quota[:, :, 0] = 0
    kept = order[place < quota.flatten()[group[order]]].sort().values
    task, fold = labels.flatten()[kept].long(), folds.reshape(-1)[kept]
    return Cells(kept // n_layers, kept % n_layers, task, fold, n_tasks, choice.folds)


def _rarest(counts: Tensor, choice: CellSampling) -> Tensor:
    """(fold, layer): cells of the rarest task, which is what there can be of each."""
    rarest = counts[:, :, 1:].amin(-1)
    rarest[:, : choice.first] = 0
    rarest[:, rarest.sum(0) < choice.least] = 0
    return rarest


def _within_limit(rarest: Tensor, n_tasks: int, choice: CellSampling) -> Tensor:
    """The same, but none above the highest number with which all of them stay within the limit."""

    def total(most: int) -> int:
        return n_tasks * int(rarest.clamp_max(most).sum())

    most = bisect_right(range(1, int(rarest.max()) + 1), choice.limit, key=total)
    wanted = rarest.clamp_max(most)
    if int(wanted.sum(1).min()) < FEWEST:
        raise BadSettings(
            f"a limit of {choice.limit} cells leaves fewer than {FEWEST} of each task in some fold "
            "of all layers; raise it, or start at a higher layer"
        )
    return wanted


def _require_enough(counts: Tensor, rarest: Tensor, rows: int, choice: CellSampling) -> None:
    """Refuse so few cells that a fold has hardly any, and say how many rows it would take."""
    n_tasks = counts.shape[2] - 1
    found = int(rarest.sum(1).min())
    if found >= FEWEST:
        return
    if found:
        advice = f"about {-(-rows * FEWEST // found)} rows like these are needed"
    else:
        seen = counts[:, choice.first :, 1:].sum((0, 1))
        rare = int(seen.argmin()) + 1
        advice = (
            f"task {rare} is the rarest, with {int(seen.min())} (row, layer) in all; many times "
            "as many rows are needed, or fewer tasks"
        )
    raise BadText(
        f"{rows} rows give {found} balanced example{'' if found == 1 else 's'} of each of "
        f"{n_tasks} tasks in some fold of {choice.folds}; a probe needs {FEWEST}: {advice}"
    )
