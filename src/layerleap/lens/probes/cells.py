"""Tasks: which rank is being decided at a layer, and a balanced sample of examples.

In: saturation layers, (row, rank). Out: the task of every (row, layer), and `Cells`: a seeded
sample of (row, layer) with the same number of every task in each layer and fold.

The definition follows "Looking Beyond the Top-1" (arXiv 2410.20210): task i at layer l if
s_{i-1} < l <= s_i. Layer s_i itself belongs to task i: its block fixed rank i. Because of the
balance, neither the layer nor the fold carries information about the task.
"""

import heapq
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText, check_choice
from layerleap.lens.saturation import Saturation
from layerleap.short_repr import ShortRepr

By = Literal["document", "row", "cell"]
FEWEST = 10  # cells of each task that every fold needs to train a probe
FIRST_LAYER = 1  # nothing has been computed at layer 0


@dataclass(frozen=True)
class CellSampling:
    """How cells are sampled."""

    tasks: int | None = None  # number of tasks, the last including all later; None: one per rank
    first_layer: int = FIRST_LAYER
    min_cells: int = 5  # a layer with fewer balanced cells per task is left out
    folds: int = 5
    limit: int = 6000  # number of cells in total, which bounds memory
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tasks is not None and self.tasks < 2:
            raise BadSettings(f"tasks {self.tasks} is too small; expected 2 or more")
        for name, low in (("first_layer", 0), ("min_cells", 1), ("folds", 2), ("limit", 1)):
            if getattr(self, name) < low:
                value = getattr(self, name)
                raise BadSettings(f"{name} {value} is too small; expected {low} or more")


@dataclass(frozen=True, eq=False, repr=False)
class Cells(ShortRepr):
    """Pairs (row, layer) in ascending order, with task (from 1) and fold: (cell,) each."""

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
    """The task of every row at every layer: (row, n_layers + 1), 1 to k; 0 once all saturated.

    If ranks saturate out of order, a layer can match several tasks. The first counts: the best
    rank that is not saturated yet.

    Args:
        tasks: combine this task and all later ones, including those after the last known rank:
            with 2, "the first rank is open" against "it is saturated". None keeps one per rank.
    """
    is_open = _open(saturation)
    k = is_open.shape[-1]
    if tasks is not None and tasks > k:
        raise BadSettings(f"cannot separate {tasks} tasks: the saturation layers have {k} ranks")
    none = 0 if tasks is None else tasks
    label = torch.where(is_open.any(-1), is_open.int().argmax(-1) + 1, none)
    return label.clamp_max(tasks or k).to(torch.int8)


def ambiguous(saturation: Saturation, first_layer: int = FIRST_LAYER) -> float:
    """The share of labelled (row, layer) from `first_layer` on that match several tasks."""
    is_open = _open(saturation)[:, first_layer:]
    saturated_before = torch.ones_like(is_open)
    saturated_before[..., 1:] = ~is_open[..., :-1]
    matches = (is_open & saturated_before).sum(-1)
    return float((matches > 1).sum() / (matches > 0).sum().clamp_min(1))


def _open(saturation: Saturation) -> Tensor:
    """(row, layer, rank): True up to and including the saturation layer."""
    layers = torch.arange(saturation.n_layers + 1)
    return saturation.layer[:, None, :] >= layers[None, :, None]


def folds_of(documents: Tensor, shape: tuple[int, int], n: int, by: By, seed: int) -> Tensor:
    """The fold of every (row, layer): (row, layer), 0 to n - 1.

    Args:
        documents: (row,) the document of each row.
        by: what is never split between folds: a document, a row, or only a single (row, layer).
            The last one leaks: a row's state and task hardly change from one layer to the next, so
            a probe can memorise rows. It is here to demonstrate that.
    """
    rows, layers = shape
    check_choice(by, By, "by")
    numbers = torch.arange(rows * layers)
    units = {"document": documents, "row": numbers[:rows], "cell": numbers}[by]
    names, group = units.unique(return_inverse=True)
    if len(names) < n:
        raise BadText(f"{len(names)} {by}s are too few for {n} folds; expected at least {n}")
    fold = _dealt_folds(torch.bincount(group), n, seed)[group]
    return fold.view(rows, layers) if by == "cell" else fold[:, None].expand(rows, layers)


def _dealt_folds(sizes: Tensor, n: int, seed: int) -> Tensor:
    """The fold of each group: largest group first, ties at random, each to the smallest fold."""
    shuffled = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    order = shuffled[sizes[shuffled].argsort(descending=True, stable=True)].tolist()
    heap = [(0, fold) for fold in range(n)]
    fold_of = torch.empty(len(sizes), dtype=torch.int64)
    for group in order:
        size, fold = heapq.heappop(heap)
        fold_of[group] = fold
        heapq.heappush(heap, (size + int(sizes[group]), fold))
    return fold_of


def cells_of(saturation: Saturation, sampling: CellSampling, by: By = "document") -> Cells:
    """A balanced sample of (row, layer) with their tasks and folds."""
    labels = task_labels(saturation, sampling.tasks)
    shape = labels.shape[0], labels.shape[1]
    folds = folds_of(saturation.documents, shape, sampling.folds, by, sampling.seed)
    return choose_cells(labels, folds, sampling.tasks or saturation.k, sampling)


def choose_cells(labels: Tensor, folds: Tensor, n_tasks: int, sampling: CellSampling) -> Cells:
    """As many cells as balance allows: every task equally often in each layer of each fold.

    `labels` and `folds` are (row, layer), from `task_labels` and `folds_of`.
    """
    n_layers = labels.shape[1]
    if sampling.first_layer >= n_layers:
        raise BadSettings(
            f"first_layer {sampling.first_layer} does not exist; expected 0 to {n_layers - 1}"
        )
    column = torch.arange(n_layers)
    group = ((folds * n_layers + column) * (n_tasks + 1) + labels).flatten()
    shape = (sampling.folds, n_layers, n_tasks + 1)
    counts = torch.bincount(group, minlength=shape[0] * shape[1] * shape[2]).view(shape)
    rarest = _rarest(counts, sampling)
    _require_enough(counts, rarest, len(labels), sampling)
    per_task = _within_limit(rarest, n_tasks, sampling)
    random = torch.rand(len(group), generator=torch.Generator().manual_seed(sampling.seed))
    order = torch.from_numpy(np.lexsort((random.numpy(), group.numpy())))
    start = counts.flatten().cumsum(0) - counts.flatten()
    place = torch.arange(len(group)) - start[group[order]]  # of a cell within its group
    quota = per_task[:, :, None].repeat(1, 1, n_tasks + 1)
    quota[:, :, 0] = 0
    cells = order[place < quota.flatten()[group[order]]].sort().values
    task, fold = labels.flatten()[cells].long(), folds.reshape(-1)[cells]
    return Cells(cells // n_layers, cells % n_layers, task, fold, n_tasks, sampling.folds)


def _rarest(counts: Tensor, sampling: CellSampling) -> Tensor:
    """(fold, layer): the number of cells of the rarest task, so the most of each task."""
    rarest = counts[:, :, 1:].amin(-1)
    rarest[:, : sampling.first_layer] = 0
    rarest[:, rarest.sum(0) < sampling.min_cells] = 0
    return rarest


def _within_limit(rarest: Tensor, n_tasks: int, sampling: CellSampling) -> Tensor:
    """`rarest`, capped so that the total stays within the limit."""

    def total(most: int) -> int:
        return n_tasks * int(rarest.clamp_max(most).sum())

    most = bisect_right(range(1, int(rarest.max()) + 1), sampling.limit, key=total)
    capped = rarest.clamp_max(most)
    if int(capped.sum(1).min()) < FEWEST:
        raise BadSettings(
            f"a limit of {sampling.limit} cells leaves fewer than {FEWEST} of each task in some "
            "fold; raise it, or start at a higher layer"
        )
    return capped


def _require_enough(counts: Tensor, rarest: Tensor, rows: int, sampling: CellSampling) -> None:
    """Refuse if a fold has too few cells, and say how many rows are needed."""
    n_tasks = counts.shape[2] - 1
    fewest = int(rarest.sum(1).min())
    if fewest >= FEWEST:
        return
    if fewest:
        advice = f"give about {-(-rows * FEWEST // fewest)} rows like these"
    else:
        totals = counts[:, sampling.first_layer :, 1:].sum((0, 1))
        advice = (
            f"task {int(totals.argmin()) + 1} is the rarest, with {int(totals.min())} (row, layer) "
            "in total; give many times as many rows, or use fewer tasks"
        )
    raise BadText(
        f"{rows} rows give {fewest} balanced example{'' if fewest == 1 else 's'} of each of "
        f"{n_tasks} tasks in some fold of {sampling.folds}; a probe needs {FEWEST}: {advice}"
    )
