"""Rows that wait for the head, and what is kept of their readings.

In: rows of states, batch after batch, and ways of reading them.
Out: every measure of every way, (row, layer), against the model's own answer; and tables of them.
Nothing V-sized is kept: logits live for one chunk of rows.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from layerleap.models.transformer import Transformer
from layerleap.read import lens as budget
from layerleap.read.lens import chunks, require_finite
from layerleap.read.metrics import DEPTH, Answer, Bootstrap, Comparison, finite

PRECISIONS = (1, 5, 10)
# What is kept of a reading, per row and layer: how good it is, and how sure of itself.
MEASURES = {
    "rank": torch.int8, "surprisal": torch.float32, "kl": torch.float32, "top": torch.int32,
    "p1": torch.float32, "p2": torch.float32, "entropy": torch.float32, "size": torch.float32,
}  # fmt: skip
WAITING_ROWS = 1024  # at most so many rows wait for the head, however small the vocabulary

Rows = Mapping[Any, Tensor]  # rows by what they are; those of h[n_layers] under n_layers


@dataclass(frozen=True)
class Predictor:
    """One way of reading every layer below the last."""

    said: str  # what errors call it
    state: Callable[[Rows, int], Tensor]  # what it hands to the model's tail at a layer
    may_fail: bool = False  # logits that are no numbers are a wrong answer, and not an error


class LogitObserver(Protocol):
    """Shown all logits while they are there: of each chunk of rows every way, layers rising."""

    def __call__(self, way: str, layer: int, logits: Tensor) -> object:
        """`logits` are (row, d_vocab), and not to be changed."""


class RowQueue:
    """Rows of several batches, handed on as many at a time as the budget of logits allows.

    The head is by far the largest matrix; it is read from memory once per layer and way however
    few rows there are, so rows of several batches wait for one another.
    """

    def __init__(self, transformer: Transformer, use: Callable[[Rows], None]) -> None:
        """Nothing waits yet; `use` will be given rows of one chunk at a time, in order."""
        self.transformer, self.use = transformer, use
        self._waiting: list[Rows] = []
        self._rows = 0

    def add(self, rows: Rows) -> None:
        """Take in the rows of one batch; every batch has the same keys."""
        self._waiting.append(rows)
        self._rows += len(rows[self.transformer.n_layers])
        if self._rows >= min(WAITING_ROWS, budget.ENTRIES // self.transformer.d_vocab):
            self.settle()

    def settle(self) -> None:
        """Hand on all that still waits."""
        if not self._waiting:
            return
        every: dict[Hashable, Tensor] = {
            key: torch.cat([rows[key] for rows in self._waiting]) for key in self._waiting[0]
        }
        n_rows, self._waiting, self._rows = self._rows, [], 0
        for part in chunks(n_rows, self.transformer.d_vocab):
            self.use({key: value[part] for key, value in every.items()})


class Reader:
    """Compares rows with the model's answer, as many at a time as the budget of logits allows."""

    def __init__(
        self,
        transformer: Transformer,
        ways: Mapping[str, Predictor],
        layers: Sequence[int] | None = None,
        watch: LogitObserver | None = None,
    ) -> None:
        """Nothing read yet.

        Args:
            transformer: the model.
            ways: by name.
            layers: those below the last that are read, in order; all when None.
            watch: shown all logits, those of the last layer included.
        """
        self.transformer, self.ways, self.watch = transformer, ways, watch
        self.layers = tuple(range(transformer.n_layers) if layers is None else layers)
        self.kept: dict[tuple[str, str], list[Tensor]] = {
            (measure, name): [] for measure in MEASURES for name in ways
        }
        self.waiting = RowQueue(transformer, self._compare)

    def add(self, rows: Rows) -> None:
        """Take in the rows of one batch; every batch has the same keys."""
        self.waiting.add(rows)

    def columns(self) -> dict[str, dict[str, Tensor]]:
        """By measure and way: (row, layer), and last of all the model itself."""
        self.waiting.settle()
        return {m: {way: torch.cat(self.kept[m, way]) for way in self.ways} for m in MEASURES}

    def _compare(self, rows: Rows) -> None:
        last = self.transformer.n_layers
        answer = Answer(self.transformer.logits(rows[last]))
        own = answer.compare(answer.logits)  # what everything reads at the last layer
        require_finite(own, "the model itself", last)
        for name, way in self.ways.items():
            compared = []
            sizes = []
            for layer in self.layers:
                state = way.state(rows, layer)
                logits = self.transformer.logits(state).to(answer.p.device)
                one = answer.compare(logits)
                compared.append(_answered(one) if way.may_fail else one)
                sizes.append(_size(state))
                if not way.may_fail:
                    require_finite(one, way.said, layer)
                if self.watch is not None:
                    self.watch(name, layer, logits)
            if self.watch is not None:
                self.watch(name, last, answer.logits)
            sizes.append(_size(rows[last]))
            for measure in MEASURES:
                columns = (
                    sizes
                    if measure == "size"
                    else [getattr(c, measure).cpu() for c in [*compared, own]]
                )
                values = torch.stack(columns, 1).to(MEASURES[measure])
                self.kept[measure, name].append(values)


def _size(state: Tensor) -> Tensor:
    """The length of what is handed to the tail: a final norm erases it, but it tells something.

    A fitted map carries a state that it knows little of to near the mean, so to a short one.
    """
    return state.float().norm(dim=-1).cpu()


def _answered(compared: Comparison) -> Comparison:
    """Rows without numbers as wrong as can be: no rank, and endlessly far from the model."""
    failed = ~(compared.kl.isfinite() & compared.surprisal.isfinite())
    filled = {"top": -1, "rank": DEPTH, "surprisal": torch.inf, "kl": torch.inf}
    filled |= dict.fromkeys(("p1", "p2", "entropy"), torch.nan)
    return replace(
        compared,
        **{key: getattr(compared, key).masked_fill(failed, value) for key, value in filled.items()},
    )


def score_table(
    documents: Tensor,
    columns: Mapping[str, Mapping[str, Tensor]],
    labels: Mapping[str, Any],
    layers: Sequence[int] | None = None,
    *,
    answered: bool = False,
) -> list[dict[str, Any]]:
    """One row per way, metric and layer, with 95 % intervals over documents.

    Args:
        documents: which document each row is of: (row,).
        columns: "rank", "surprisal" and "kl", each by way: (row, layer).
        labels: what else every row of the table is to say.
        layers: what the columns are of; 0, 1, 2, ... when None.
        answered: one more metric, the share of rows that gave numbers at all. Where it is below
            1, surprisal and KL have no mean, and are None.
    """
    found = []
    bootstrap = Bootstrap(documents)
    for name, rank in columns["rank"].items():
        metrics = {
            **{f"precision@{k}": (rank < k).float() for k in PRECISIONS},
            "surprisal": columns["surprisal"][name],
            "kl": columns["kl"][name],
        }
        if answered:
            metrics["answered"] = columns["kl"][name].isfinite().float()
        for metric, values in metrics.items():
            numbers = range(values.shape[1]) if layers is None else layers
            for layer, e in zip(numbers, bootstrap.estimates(values), strict=True):
                found.append(
                    {
                        **labels, "map": name, "layer": layer, "metric": metric,
                        "value": finite(e.value), "low": finite(e.low), "high": finite(e.high),
                        "rows": e.rows, "documents": e.documents,
                    }
                )  # fmt: skip
    return found
