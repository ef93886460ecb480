"""Metrics that compare a reading with the model's output, one value per row.

In: logits of the model and of a reading, (row, d_vocab). Out: numbers per row, nothing V-sized.
`Bootstrap` turns rows into means with intervals. It resamples whole documents, because positions
of one document are not independent.

Definitions follow "Jump to Conclusions" (arXiv 2303.09435), section 4:
    Precision@k   the reading's top token is among the model's top k
    Surprisal     -ln p_model(the reading's top token), nats; at the last layer -ln p_max, not 0
    KL            KL(model || reading), nats
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerleap.brief import Brief
from layerleap.extras import learn_library

DEPTH = 10  # Precision@k is known for k up to this
ENTRIES = 2**22  # (sample, document) held at a time while resampling: 32 MB


@dataclass(frozen=True, repr=False)
class Comparison(Brief):
    """A reading compared with the model, per row, and the reading's own confidence."""

    top: Tensor  # the reading's top token
    rank: Tensor  # its rank in the model's output, 0 = first; DEPTH means DEPTH or lower
    surprisal: Tensor
    kl: Tensor
    top_prob: Tensor  # the reading's probability of its top token
    second_prob: Tensor  # and of its second token
    entropy: Tensor  # of the reading, nats


class Distribution:
    """Logits as probabilities, with a few statistics per row: (row, d_vocab) -> (row,)."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.float()
        self.p = self.logits.softmax(-1)
        # Of equal logits, torch returns the lowest id.
        highest, self.top = self.logits.max(-1)
        self.top_prob = self.p.gather(-1, self.top[:, None])[:, 0]
        self.log_norm = (
            highest - self.top_prob.log()
        )  # much cheaper than another pass for logsumexp
        self.entropy = self.log_norm - torch.linalg.vecdot(self.p, self.logits)

    def second(self) -> Tensor:
        """The probability of the second token. Call it last: it overwrites `p`."""
        return self.p.scatter_(-1, self.top[:, None], 0.0).amax(-1)


class Reference(Distribution):
    """The model's own distribution for a few rows, ready to compare readings with."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits)
        self.best = self.logits.topk(min(DEPTH + 1, logits.shape[-1])).values

    def compare(self, reading: Tensor) -> Comparison:
        """How the logits `reading` (row, d_vocab) differ from the model's.

        A reference of one row is compared with each row of the reading.
        """
        read = Distribution(reading)
        chosen = self.logits.expand_as(reading).gather(-1, read.top[:, None])
        cross = read.log_norm - torch.linalg.vecdot(self.p, read.logits)
        # Clamped because rounding can push a divergence of zero slightly below zero.
        kl = (cross - self.entropy).clamp_min(0)
        return Comparison(
            read.top, self._rank(chosen, read.top), self.log_norm - chosen[:, 0], kl,
            read.top_prob, read.second(), read.entropy,
        )  # fmt: skip

    def _rank(self, chosen: Tensor, top: Tensor) -> Tensor:
        rank = (self.best > chosen).sum(-1).clamp_max(DEPTH)
        tied = ((self.best == chosen).sum(-1) > 1).nonzero()[:, 0]
        for row in tied.tolist():  # rare: equal logits are ordered by id, like the top token
            own = self.logits[row if len(self.logits) > 1 else 0]
            before = own[: int(top[row])] == chosen[row]
            rank[row] = min(DEPTH, int(rank[row] + before.sum()))
        return rank


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval and its sample size."""

    value: float
    low: float | None  # None with one document: the spread between documents is unknown
    high: float | None
    rows: int
    documents: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; None for NaN and infinity."""
        ends = {key: finite(getattr(self, key)) for key in ("value", "low", "high")}
        return {**ends, "rows": self.rows, "documents": self.documents}


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; honest with few cases, or none that succeed."""
    return learn_library("scipy.stats").binomtest(successes, n).proportion_ci(method="wilson")


class Bootstrap:
    """Bootstrap samples of documents, for any number of metrics.

    Few samples are drawn once and kept. More are drawn again for each metric, some at a time, so
    that memory does not grow with samples x documents.
    """

    def __init__(self, documents: Tensor, *, resamples: int = 1000, seed: int = 0) -> None:
        names, self.group = documents.unique(return_inverse=True)
        self.n_rows, self.n_documents = len(documents), len(names)
        self._draw = partial(resample_in_parts, len(names), resamples, seed)
        self._drawn = list(self._draw()) if resamples * len(names) <= ENTRIES else None
        self.totals = self.sums(torch.ones(self.n_rows, 1))  # rows in each sample

    def by_document(self, values: Tensor) -> Tensor:
        """Column sums of each document: (row, column) -> (document, column)."""
        sums = torch.zeros(self.n_documents, values.shape[1], dtype=torch.float64)
        return sums.index_add_(0, self.group, values.double())

    def sums(self, values: Tensor) -> Tensor:
        """Column sums of each bootstrap sample: (row, column) -> (sample, column)."""
        sums = self.by_document(values)
        return torch.cat([weights @ sums for weights in self._drawn or self._draw()])

    def estimates(self, values: Tensor, *, level: float = 0.95) -> list[Estimate]:
        """Column means of (row, column) with percentile intervals."""
        low, high = percentiles(self.sums(values) / self.totals, level).tolist()
        known = self.n_documents > 1
        return [
            Estimate(c, lo if known else None, hi if known else None, self.n_rows, self.n_documents)
            for c, lo, hi in zip(values.double().mean(0).tolist(), low, high, strict=True)
        ]


def mean_interval(
    values: Tensor, documents: Tensor, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> list[Estimate]:
    """Column means of (row, column) with percentile intervals from resampled documents."""
    return Bootstrap(documents, resamples=resamples, seed=seed).estimates(values, level=level)


def finite(value: float | None) -> float | None:
    """The value, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def percentiles(samples: Tensor, level: float = 0.95, *, skip_nan: bool = False) -> Tensor:
    """Both ends of the middle `level` of the samples: (sample, ...) -> (2, ...)."""
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=samples.dtype)
    return (samples.nanquantile if skip_nan else samples.quantile)(ends, dim=0)


def resample(n: int, times: int, seed: int) -> Tensor:
    """How often each of n groups is drawn in each of `times` bootstrap samples: (times, n)."""
    return torch.cat(list(resample_in_parts(n, times, seed)))


def resample_in_parts(n: int, times: int, seed: int) -> Iterator[Tensor]:
    """What `resample` returns, some rows at a time; the parts do not depend on their sizes."""
    generator = torch.Generator().manual_seed(seed)
    step = max(1, ENTRIES // n)
    for start in range(0, times, step):
        drawn = torch.randint(n, (min(step, times - start), n), generator=generator)
        counts = torch.zeros(drawn.shape, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(counts))
