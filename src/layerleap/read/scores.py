"""How good lenses are over a text: every measure, every layer, from one forward pass.

In: a wrapped model, named lenses, and batches of a text that was not fitted on.
Out: `Scores`: a few numbers per row, layer and lens, from which tables with intervals are made;
and `Quality`: squared errors for R2 between all pairs of layers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.lens import Lens, chunks
from layerleap.read.metrics import Answer, mean_interval, resample
from layerleap.stream.examples import Batch

PRECISIONS = (1, 5, 10)
QUALITY_ROWS = 512  # rows that wait before R2 is brought up to date
GROUPS = 32  # documents are dealt into at most so many groups for the intervals of R2


@dataclass
class Scores:
    """Per row: the model's rank of the reading's top token, surprisal and KL, by lens and layer."""

    documents: Tensor  # (row,)
    positions: Tensor  # (row,)
    rank: dict[str, Tensor]  # (row, layer) int8
    surprisal: dict[str, Tensor]  # (row, layer)
    kl: dict[str, Tensor]  # (row, layer)

    def table(self, **labels: Any) -> list[dict[str, Any]]:
        """One row per lens, metric and layer, with 95 % intervals over documents."""
        found = []
        for name in self.rank:
            columns = {
                **{f"precision@{k}": (self.rank[name] < k).float() for k in PRECISIONS},
                "surprisal": self.surprisal[name],
                "kl": self.kl[name],
            }
            for metric, values in columns.items():
                for layer, e in enumerate(mean_interval(values, self.documents)):
                    found.append(
                        {
                            **labels, "map": name, "layer": layer, "metric": metric,
                            "value": e.value, "low": e.low, "high": e.high,
                            "rows": e.rows, "documents": e.documents,
                        }
                    )  # fmt: skip
        return found


class Quality:
    """Squared errors of maps between all pairs of layers, per coordinate and group of documents.

    R2(src, dst) is the plain average over coordinates of 1 - error / spread, the paper's measure;
    `weighted` lets each coordinate count by its spread. The first position is also counted apart,
    for its states are often outliers of enormous norm.
    """

    def __init__(self, transformer: Transformer, bank: ShortcutBank) -> None:
        self.bank, self.n_layers, width = bank, transformer.n_layers, transformer.d_model
        self.pairs = sorted(bank.maps)
        self.group_of: dict[int, int] = {}
        # Rows of the tensors below: GROUPS groups, then the first positions a second time.
        shape = (GROUPS + 1, width)
        self.n = torch.zeros(GROUPS + 1, dtype=torch.float64)
        self.sums = torch.zeros(self.n_layers + 1, 2, *shape, dtype=torch.float64)  # y and y^2
        self.errors = {
            name: {pair: torch.zeros(shape, dtype=torch.float64) for pair in self.pairs}
            for name in ("mat", "id")
        }
        self._waiting: list[tuple[dict[int, Tensor], Tensor]] = []

    def add(self, states: Mapping[int, Tensor], batch: Batch) -> None:
        """Take in the rows of one batch."""
        groups = [
            self.group_of.setdefault(document, len(self.group_of) % GROUPS)
            for document in batch.documents.tolist()
        ]
        member = torch.zeros(len(groups), GROUPS + 1, dtype=torch.float64)
        member[torch.arange(len(groups)), groups] = 1
        member[:, GROUPS] = (batch.positions == 0).double()
        h = {layer: value.float().cpu() for layer, value in states.items()}
        self._waiting.append((h, member))
        if sum(len(rows) for _, rows in self._waiting) >= QUALITY_ROWS:
            self._settle()

    def _settle(self) -> None:
        """Count the waiting rows; many at a time, because every map has to be read for them."""
        if not self._waiting:
            return
        member = torch.cat([rows for _, rows in self._waiting]).T  # (group, row)
        layers = range(self.n_layers + 1)
        h = {layer: torch.cat([states[layer] for states, _ in self._waiting]) for layer in layers}
        self._waiting = []
        self.n += member.sum(1)
        for layer, value in h.items():
            exact = value.double()
            self.sums[layer, 0] += member @ exact
            self.sums[layer, 1] += member @ exact.square()
        for src, dst in self.pairs:
            for name, predicted in (("mat", self.bank[src, dst](h[src])), ("id", h[src])):
                error = (predicted - h[dst]).square().double()
                self.errors[name][src, dst] += member @ error

    def table(self, *, resamples: int = 200, seed: int = 0) -> list[dict[str, Any]]:
        """One row per map and pair of layers."""
        self._settle()
        used = min(GROUPS, len(self.group_of))
        # One row of weights per way of counting: everything, without first positions, resampled.
        weights = torch.zeros(2 + resamples, GROUPS + 1, dtype=torch.float64)
        weights[:2, :GROUPS] = 1
        weights[1, GROUPS] = -1
        weights[2:, :used] = resample(used, resamples, seed)
        n = weights @ self.n
        found = []
        for name, by_pair in self.errors.items():
            for (src, dst), errors in by_pair.items():
                error = weights @ errors
                spread = _spread(weights @ self.sums[dst, 0], weights @ self.sums[dst, 1], n)
                r2 = _average(error, spread)
                ends = torch.quantile(r2[2:], torch.tensor([0.025, 0.975]).double()).tolist()
                low, high = ends if used > 1 else (None, None)
                found.append(
                    {
                        "map": name, "src": src, "dst": dst, "r2": r2[0].item(),
                        "low": low, "high": high,
                        "weighted": (1 - error[0].sum() / spread[0].nansum()).item(),
                        "no_first": r2[1].item() if n[1] > 1 else None,
                        "rows": int(n[0]), "documents": len(self.group_of),
                    }
                )  # fmt: skip
        return found


def _spread(y: Tensor, yy: Tensor, n: Tensor) -> Tensor:
    """Squared deviations from the mean, NaN for a coordinate that never varies."""
    spread = yy - y.square() / n[:, None]
    return spread.where(spread > 1e-12 * yy, torch.nan)


def _average(error: Tensor, spread: Tensor) -> Tensor:
    """R2 with every coordinate counting alike; coordinates that never vary are left out."""
    return (1 - error / spread).nanmean(-1)


@dataclass
class _Columns:
    """Grows by one block of rows per batch."""

    blocks: list[Tensor] = field(default_factory=list)

    def joined(self) -> Tensor:
        return torch.cat(self.blocks)


@torch.inference_mode()
def score(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    *,
    quality: Quality | None = None,
    progress: Progress = silent,
    total: int | None = None,
    phase: str = "reading",
) -> Scores:
    """Read every kept position through every lens at every layer."""
    kept: dict[tuple[str, str], _Columns] = {
        (lens, measure): _Columns() for lens in lenses for measure in ("rank", "surprisal", "kl")
    }
    documents, positions, texts = _Columns(), _Columns(), 0
    for batch in batches:
        seen = transformer.see(batch.inputs, keep=batch.keep)
        documents.blocks.append(batch.documents)
        positions.blocks.append(batch.positions)
        if quality is not None:
            quality.add(seen.states, batch)
        for rows in chunks(len(batch.documents), transformer.d_vocab):
            _compare(transformer, lenses, {at: h[rows] for at, h in seen.states.items()}, kept)
        texts += batch.n_texts
        progress(phase, texts, total)
    if not documents.blocks:
        raise BadText("no position to read: the held-out part of the text is empty")
    by = {m: {lens: kept[lens, m].joined() for lens in lenses} for m in ("rank", "surprisal", "kl")}
    return Scores(documents.joined(), positions.joined(), **by)


def _compare(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    states: Mapping[int, Tensor],
    kept: dict[tuple[str, str], _Columns],
) -> None:
    last = transformer.n_layers
    answer = Answer(transformer.logits(states[last]))
    for name, lens in lenses.items():
        compared = [
            answer.compare(lens.logits(states[layer], layer).to(answer.p.device))
            for layer in range(last + 1)
        ]
        kept[name, "rank"].blocks.append(
            torch.stack([c.rank for c in compared], 1).to(torch.int8).cpu()
        )
        for measure in ("surprisal", "kl"):
            values = torch.stack([getattr(c, measure) for c in compared], 1)
            kept[name, measure].blocks.append(values.cpu())
