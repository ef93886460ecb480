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
        shape = (GROUPS, width)
        self.group_of: dict[int, int] = {}
        self.n, self.n_first = torch.zeros(GROUPS, dtype=torch.float64), 0.0
        self.sums = torch.zeros(self.n_layers + 1, 2, *shape, dtype=torch.float64)  # y and y^2
        self.first = torch.zeros(self.n_layers + 1, 2, width, dtype=torch.float64)
        empty = {pair: torch.zeros(shape, dtype=torch.float64) for pair in self.pairs}
        self.errors = {"mat": empty, "id": {pair: value.clone() for pair, value in empty.items()}}
        self.first_errors = {
            name: {pair: torch.zeros(width, dtype=torch.float64) for pair in self.pairs}
            for name in self.errors
        }

    def add(self, states: Mapping[int, Tensor], batch: Batch) -> None:
        """Take in the rows of one batch."""
        group = torch.tensor(
            [
                self.group_of.setdefault(d, len(self.group_of) % GROUPS)
                for d in batch.documents.tolist()
            ]
        )
        first = batch.positions == 0
        h = {layer: value.float().cpu() for layer, value in states.items()}
        self.n += torch.bincount(group, minlength=GROUPS)
        self.n_first += int(first.sum())
        for layer, value in h.items():
            for power in (0, 1):
                exact = value.double() ** (power + 1)
                self.sums[layer, power].index_add_(0, group, exact)
                self.first[layer, power] += exact[first].sum(0)
        for src, dst in self.pairs:
            for name, predicted in (("mat", self.bank[src, dst](h[src])), ("id", h[src])):
                error = (predicted - h[dst]).square().double()
                self.errors[name][src, dst].index_add_(0, group, error)
                self.first_errors[name][src, dst] += error[first].sum(0)

    def table(self, *, resamples: int = 200, seed: int = 0) -> list[dict[str, Any]]:
        """One row per map and pair of layers."""
        used = min(GROUPS, len(self.group_of))
        weights = resample(used, resamples, seed)
        rows, later = int(self.n.sum()), self.n.sum() - self.n_first
        found = []
        for name, by_pair in self.errors.items():
            for (src, dst), error in by_pair.items():
                y, yy = self.sums[dst]
                whole = _r2(error.sum(0), y.sum(0), yy.sum(0), self.n.sum())
                drawn = _r2(
                    weights @ error[:used], weights @ y[:used], weights @ yy[:used],
                    (weights @ self.n[:used])[:, None],
                )  # fmt: skip
                ends = torch.quantile(drawn, torch.tensor([0.025, 0.975]).double()).tolist()
                low, high = ends if used > 1 else (None, None)
                rest = _r2(
                    error.sum(0) - self.first_errors[name][src, dst],
                    y.sum(0) - self.first[dst, 0], yy.sum(0) - self.first[dst, 1], later,
                )  # fmt: skip
                spread = yy.sum(0) - y.sum(0).square() / self.n.sum()
                found.append(
                    {
                        "map": name, "src": src, "dst": dst, "r2": whole.item(),
                        "low": low, "high": high,
                        "weighted": (1 - error.sum() / spread.sum()).item(),
                        "no_first": rest.item() if later > 1 else None,
                        "rows": rows, "documents": len(self.group_of),
                    }
                )  # fmt: skip
        return found


def _r2(error: Tensor, y: Tensor, yy: Tensor, n: Tensor) -> Tensor:
    """Coordinate average of 1 - error / spread; a coordinate that never varies is left out."""
    spread = yy - y.square() / n
    alive = spread > 1e-12 * yy.clamp_min(1e-300)
    ratio = torch.where(alive, 1 - error / spread.clamp_min(1e-300), torch.nan)
    return ratio.nanmean(-1)


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
