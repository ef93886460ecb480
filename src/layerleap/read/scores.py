"""How good lenses are over a text: every measure, every layer, from one forward pass.

In: a wrapped model, named lenses, and batches of a text that was not fitted on.
Out: `Scores`: a few numbers per row, layer and lens, from which tables with intervals are made.
Every so often the model runs to its very end, and its own logits are compared with what the
tail makes of the last state: all measures rest on their being the same (`TailCheck`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadText, ModelRefused
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read import lens as budget
from layerleap.read.lens import Lens, chunks, require_finite
from layerleap.read.metrics import Answer, Bootstrap, finite
from layerleap.read.quality import GROUPS, Quality
from layerleap.stream.examples import Batch

__all__ = ["GROUPS", "PRECISIONS", "Quality", "Scores", "TailCheck", "score"]

PRECISIONS = (1, 5, 10)
# What is kept of a reading, per row and layer: how good it is, and how sure of itself.
MEASURES = {
    "rank": torch.int8, "surprisal": torch.float32, "kl": torch.float32, "top": torch.int32,
    "p1": torch.float32, "p2": torch.float32, "entropy": torch.float32,
}  # fmt: skip
WAITING_ROWS = 1024  # at most so many rows wait for the head, however small the vocabulary
CHECK_EVERY = 16  # batches from one that runs to the model's own logits to the next
MOST_WRONG = 0.01  # share of rows that may disagree with the model's own top token


@dataclass
class TailCheck:
    """The tail applied to the last state, against the model's own logits on the same rows."""

    rows: int = 0
    wrong: int = 0  # rows with another top token, ties up to rounding not counted
    gap: float = 0.0  # largest difference of log-probabilities

    @property
    def agreement(self) -> float | None:
        """The share of rows with the model's own top token; None before any was checked."""
        return 1 - self.wrong / self.rows if self.rows else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"rows": self.rows, "agreement": self.agreement, "gap": finite(self.gap)}

    def add(self, own: Tensor, made: Tensor) -> None:
        """Take in rows of the model's logits and of the tail's."""
        # Equal up to rounding, as bfloat16 logits often are: either token may then come first.
        slack = 4 * torch.finfo(own.dtype).eps * own.abs().amax(-1).double()
        own, made = own.double(), made.to(own.device).double()
        chosen = own.gather(-1, made.argmax(-1, keepdim=True))[:, 0]
        difference = (own.log_softmax(-1) - made.log_softmax(-1)).abs().max()
        self.rows += len(own)
        self.wrong += int((~(chosen >= own.amax(-1) - slack)).sum())
        self.gap = max(self.gap, float(difference))

    def require(self, *, rows: int = 0) -> None:
        """Refuse the model if too many rows disagree, of those checked or of `rows` if more."""
        if self.wrong > MOST_WRONG * max(self.rows, rows):
            raise ModelRefused(
                f"law 'tail' failed on real text: the tail applied to the last state gives another "
                f"top token than the model itself in {self.wrong} of {self.rows} rows; the tail "
                "was found wrongly: name blocks and tail by hand"
            )


@dataclass
class Scores:
    """What is kept of readings: (row, layer) by lens, as `metrics.Comparison` defines it."""

    documents: Tensor  # (row,)
    positions: Tensor  # (row,)
    rank: dict[str, Tensor]  # (row, layer) int8
    surprisal: dict[str, Tensor]  # (row, layer)
    kl: dict[str, Tensor]  # (row, layer)
    top: dict[str, Tensor]  # (row, layer) int32
    p1: dict[str, Tensor]
    p2: dict[str, Tensor]
    entropy: dict[str, Tensor]
    cosine: Tensor  # (row, layer): of h[layer] with h[layer - 1]; NaN at layer 0
    check: TailCheck = field(default_factory=TailCheck)

    def table(self, **labels: Any) -> list[dict[str, Any]]:
        """One row per lens, metric and layer, with 95 % intervals over documents."""
        found = []
        bootstrap = Bootstrap(self.documents)
        for name in self.rank:
            columns = {
                **{f"precision@{k}": (self.rank[name] < k).float() for k in PRECISIONS},
                "surprisal": self.surprisal[name],
                "kl": self.kl[name],
            }
            for metric, values in columns.items():
                for layer, e in enumerate(bootstrap.estimates(values)):
                    found.append(
                        {
                            **labels, "map": name, "layer": layer, "metric": metric,
                            "value": finite(e.value), "low": finite(e.low), "high": finite(e.high),
                            "rows": e.rows, "documents": e.documents,
                        }
                    )  # fmt: skip
        return found


@torch.no_grad()  # not inference mode: the results are the caller's to use as they like
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
    reader, check, texts = _Reader(transformer, lenses), TailCheck(), 0
    documents: list[Tensor] = []
    positions: list[Tensor] = []
    for number, batch in enumerate(batches):
        to_the_end = number % CHECK_EVERY == 0
        seen = transformer.see(batch.inputs, keep=batch.keep, logits=to_the_end)
        if seen.logits is not None:
            own = seen.logits[batch.keep.to(seen.logits.device)]
            _check_tail(transformer, own, seen.states[transformer.n_layers], check)
            check.require(rows=100)  # a handful of rows must not decide it
        documents.append(batch.documents)
        positions.append(batch.positions)
        if quality is not None:
            quality.add(seen.states, batch)
        reader.add(seen.states)
        texts += batch.n_texts
        progress(phase, texts, total)
    if not documents:
        raise BadText("no position to read: the held-out part of the text is empty")
    check.require()
    return Scores(
        torch.cat(documents), torch.cat(positions), **reader.columns(),
        cosine=torch.cat(reader.cosine), check=check,
    )  # fmt: skip


def _check_tail(transformer: Transformer, own: Tensor, last: Tensor, check: TailCheck) -> None:
    for rows in chunks(len(own), transformer.d_vocab):
        check.add(own[rows], transformer.logits(last[rows]))


class _Reader:
    """Compares rows with the model's answer, as many at a time as the budget of logits allows.

    The head is by far the largest matrix; it is read from memory once per layer and lens however
    few rows there are, so rows of several batches wait for one another.
    """

    def __init__(self, transformer: Transformer, lenses: Mapping[str, Lens]) -> None:
        self.transformer, self.lenses = transformer, lenses
        self.kept: dict[tuple[str, str], list[Tensor]] = {
            (measure, lens): [] for measure in MEASURES for lens in lenses
        }
        self.cosine: list[Tensor] = []
        self._waiting: list[Mapping[int, Tensor]] = []
        self._rows = 0

    def add(self, states: Mapping[int, Tensor]) -> None:
        """Take in the rows of one batch."""
        self._waiting.append(states)
        self._rows += len(states[self.transformer.n_layers])
        if self._rows >= min(WAITING_ROWS, budget.ENTRIES // self.transformer.d_vocab):
            self._settle()

    def columns(self) -> dict[str, dict[str, Tensor]]:
        """By measure and lens: (row, layer)."""
        self._settle()
        return {m: {lens: torch.cat(self.kept[m, lens]) for lens in self.lenses} for m in MEASURES}

    def _settle(self) -> None:
        if not self._waiting:
            return
        layers = range(self.transformer.n_layers + 1)
        h = {layer: torch.cat([states[layer] for states in self._waiting]) for layer in layers}
        self._waiting, self._rows = [], 0
        for rows in chunks(len(h[0]), self.transformer.d_vocab):
            self._compare({layer: value[rows] for layer, value in h.items()})
        self.cosine.append(_cosines(h))

    def _compare(self, states: Mapping[int, Tensor]) -> None:
        last = self.transformer.n_layers
        answer = Answer(self.transformer.logits(states[last]))
        own = answer.compare(answer.logits)  # what every lens reads at the last layer
        require_finite(own, "the model itself", last)
        for name, lens in self.lenses.items():
            compared = []
            for layer in range(last):
                logits = lens.logits(states[layer], layer)
                compared.append(answer.compare(logits.to(answer.p.device)))
                require_finite(compared[-1], f"lens {name!r} ({lens.name})", layer)
            for measure in MEASURES:
                values = torch.stack([getattr(c, measure) for c in [*compared, own]], 1).cpu()
                self.kept[measure, name].append(values.to(MEASURES[measure]))


def _cosines(h: Mapping[int, Tensor]) -> Tensor:
    """Of each state with the one a layer below: (row, layer), NaN at layer 0."""
    pairs = [
        torch.cosine_similarity(h[layer - 1].float().to(h[layer].device), h[layer].float()).cpu()
        for layer in range(1, len(h))
    ]
    return torch.stack([torch.full((len(h[0]),), torch.nan), *pairs], dim=1)
