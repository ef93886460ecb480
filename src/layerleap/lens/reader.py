"""Compare predictions at every layer with the model's output, a chunk of rows at a time.

In: rows of states, batch after batch, and predictors that read them.
Out: every measure of every predictor, (row, layer); and tables of means with intervals.
Nothing V-sized is kept: logits live for one chunk of rows.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerleap.lens.intervals import POSITIVE, SHARE, Documents
from layerleap.lens.lens import chunks, require_finite
from layerleap.lens.metrics import DEPTH, Comparison, Reference
from layerleap.memory import rows_at_once
from layerleap.models.transformer import Transformer

PRECISIONS = (1, 5, 10)
# Recorded per reading, row and layer: how good it is, and how confident.
MEASURES = {
    "rank": torch.int8,
    "surprisal": torch.float32,
    "kl": torch.float32,
    "top": torch.int32,
    "top_prob": torch.float32,
    "second_prob": torch.float32,
    "entropy": torch.float32,
    "size": torch.float32,
}
QUEUE_ROWS = 1024  # rows queued for the head at most, however small the vocabulary is

StateRows = Mapping[Any, Tensor]  # rows of states by key; those of h[n_layers] under n_layers


@dataclass(frozen=True)
class Predictor:
    """One way to predict the model's output from each layer below the last."""

    label: str  # its name in error messages
    state: Callable[[StateRows, int], Tensor]  # the state it passes to the model's tail at a layer
    may_fail: bool = False  # count NaN and infinite logits as wrong instead of raising an error


# Called with all logits of each chunk of rows and predictor, layers ascending: the name of the
# predictor, the layer, and logits (row, d_vocab), which it must not change.
LogitObserver = Callable[[str, int, Tensor], object]


class RowQueue:
    """Collects rows of several batches and passes them on in chunks that fit the logit budget.

    The head is by far the largest matrix, and it is read from memory once per layer and predictor
    however few rows there are. So rows of several batches go through it together.
    """

    def __init__(self, transformer: Transformer, use: Callable[[StateRows], None]) -> None:
        """Start empty; `use` will be called with one chunk of rows at a time, in order."""
        self.transformer, self.use = transformer, use
        self._batches: list[StateRows] = []
        self._n_rows = 0

    def add(self, rows: StateRows) -> None:
        """Add the rows of one batch; every batch must have the same keys."""
        self._batches.append(rows)
        self._n_rows += len(rows[self.transformer.n_layers])
        last = rows[self.transformer.n_layers]
        states = 1 if last.dim() == 2 else last.shape[1]  # per row
        if self._n_rows * states >= min(QUEUE_ROWS, rows_at_once(self.transformer.d_vocab)):
            self.flush()

    def flush(self) -> None:
        """Pass on all queued rows."""
        if not self._batches:
            return
        joined: dict[Hashable, Tensor] = {
            key: torch.cat([rows[key] for rows in self._batches]) for key in self._batches[0]
        }
        n_rows, self._batches, self._n_rows = self._n_rows, [], 0
        for part in chunks(n_rows, self.transformer.d_vocab):
            self.use({key: value[part] for key, value in joined.items()})


class Reader:
    """Compares predictors with the model's output, row by row and layer by layer."""

    def __init__(
        self,
        transformer: Transformer,
        predictors: Mapping[str, Predictor],
        layers: Sequence[int] | None = None,
        on_logits: LogitObserver | None = None,
    ) -> None:
        """Start without rows, to read some layers below the last in order; all by default."""
        self.transformer, self.predictors, self.on_logits = transformer, predictors, on_logits
        self.layers = tuple(range(transformer.n_layers) if layers is None else layers)
        self._values: dict[tuple[str, str], list[Tensor]] = {
            (measure, name): [] for measure in MEASURES for name in predictors
        }
        self._queue = RowQueue(transformer, self._compare)

    def add(self, rows: StateRows) -> None:
        """Add the rows of one batch; every batch must have the same keys."""
        self._queue.add(rows)

    def columns(self) -> dict[str, dict[str, Tensor]]:
        """By measure and predictor: (row, layer). The last column is the model itself."""
        self._queue.flush()
        return {
            measure: {name: torch.cat(self._values[measure, name]) for name in self.predictors}
            for measure in MEASURES
        }

    def _compare(self, rows: StateRows) -> None:
        last = self.transformer.n_layers
        reference = Reference(self.transformer.logits(rows[last]))
        at_last = reference.compare(reference.logits)  # the same for every predictor
        require_finite(at_last, "the model itself", last)
        for name, predictor in self.predictors.items():
            compared, sizes = [], []
            for layer in self.layers:
                state = predictor.state(rows, layer)
                logits = self.transformer.logits(state).to(reference.p.device)
                comparison = reference.compare(logits)
                if predictor.may_fail:
                    comparison = _failures_marked(comparison)
                else:
                    require_finite(comparison, predictor.label, layer)
                compared.append(comparison)
                sizes.append(_size(state))
                if self.on_logits is not None:
                    self.on_logits(name, layer, logits)
            if self.on_logits is not None:
                self.on_logits(name, last, reference.logits)
            sizes.append(_size(rows[last]))
            for measure, dtype in MEASURES.items():
                columns = sizes
                if measure != "size":
                    columns = [getattr(c, measure).cpu() for c in [*compared, at_last]]
                self._values[measure, name].append(torch.stack(columns, 1).to(dtype))


def _size(state: Tensor) -> Tensor:
    """The norm of the state passed to the tail; a final norm removes it, but it is informative.

    A fitted map carries an unfamiliar state to near the mean, so its prediction is short.
    """
    return state.flatten(1).float().norm(dim=-1).cpu()


def _failures_marked(compared: Comparison) -> Comparison:
    """Rows with NaN or infinite logits count as completely wrong: no rank, infinite KL."""
    failed = ~(compared.kl.isfinite() & compared.surprisal.isfinite())
    filled = {"top": -1, "rank": DEPTH, "surprisal": torch.inf, "kl": torch.inf}
    filled |= dict.fromkeys(("top_prob", "second_prob", "entropy"), torch.nan)
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
    """One row per predictor, metric and layer, with 95 % intervals over documents.

    Args:
        documents: the document of each row: (row,).
        columns: "rank", "surprisal" and "kl", each by predictor: (row, layer).
        labels: further entries for every row of the table.
        layers: the layer of each column; 0, 1, 2, ... by default.
        answered: add one more metric, the share of rows with finite logits. Where it is below 1,
            surprisal and KL have no mean and are None.
    """
    table, by_document = [], Documents(documents)
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
            possible = POSITIVE if metric in ("surprisal", "kl") else SHARE
            for layer, e in zip(numbers, by_document.means(values, possible), strict=True):
                if layer == numbers[-1] and metric != "surprisal" and e.low is not None:
                    e = replace(e, low=e.value, high=e.value)  # it is the model itself
                row = {**labels, "map": name, "layer": layer, "metric": metric}
                table.append(row | e.to_dict())
    return table
