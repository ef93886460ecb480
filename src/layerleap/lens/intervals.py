"""95 % intervals over documents, of means and of anything else computed from sums.

In: rows with their documents. Out: an `Estimate` per column, or the ends of intervals. An estimate
always lies inside its own interval.

Positions of one document are not independent, so documents are what varies: leaving out one at a
time (the jackknife) shows how far the value moves. Student's t allows for few documents, with fewer
degrees of freedom the more unequal they are. Near the end of a range the spread shrinks with the
distance to it (Wilson's interval, and its limit for quantities without an upper end); so intervals
stay in range and reach further where there is more room. `benchmarks/coverage.py` measures how
often intervals contain the truth.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from layerleap.extras import learn_library

LEVEL = 0.95
ENTRIES = 2**22  # (sample, document) held at a time while resampling: 32 MB
GROUPS = 64  # documents are dealt into at most this many groups where leaving one out is dear

Bounds = tuple[float, float]  # the values that are possible at all
ANY: Bounds = (-math.inf, math.inf)
SHARE: Bounds = (0.0, 1.0)
DIFFERENCE: Bounds = (-1.0, 1.0)  # of two shares
POSITIVE: Bounds = (0.0, math.inf)


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
        return {key: finite(value) for key, value in vars(self).items()}


class Documents:
    """The rows of a text by document: sums, means with intervals, and intervals of functions.

    Columns are treated alike and at once.
    """

    def __init__(self, documents: Tensor) -> None:
        names, self.group = documents.unique(return_inverse=True)
        self.n_rows, self.n_documents = len(documents), len(names)
        self.sizes = torch.bincount(self.group, minlength=len(names)).double()

    def sums(self, values: Tensor) -> Tensor:
        """Column sums of each document: (row, column) -> (document, column)."""
        sums = torch.zeros(self.n_documents, values.shape[1], dtype=torch.float64)
        return sums.index_add_(0, self.group, values.double())

    def means(
        self, values: Tensor, bounds: Bounds = ANY, *, level: float = LEVEL
    ) -> list[Estimate]:
        """Column means of (row, column) with their intervals."""
        mean, error = self.spread(values, bounds)
        counts = math.sqrt(self.n_rows * self.n_documents)
        low, high = ends(mean, error, freedom(self.sizes), bounds, counts, level)
        known = self.n_documents > 1
        return [
            Estimate(m, lo if known else None, hi if known else None, self.n_rows, self.n_documents)
            for m, lo, hi in zip(mean.tolist(), low.tolist(), high.tolist(), strict=True)
        ]

    def spread(self, values: Tensor, bounds: Bounds = ANY) -> tuple[Tensor, Tensor]:
        """Column means and their variances over documents: (row, column) -> (column,) each."""
        exact = values.double()
        # Counted from a value of their own, equal numbers have no spread at all, not even rounding.
        start = exact[0].nan_to_num(0.0, 0.0, 0.0)
        sums = self.sums(exact - start)
        total = sums.sum(0)
        left_out = (total - sums) / (self.n_rows - self.sizes)[:, None]
        variance = _variance(total / self.n_rows, left_out)
        mean = exact.mean(0)
        if math.isfinite(bounds[0]) and math.isfinite(bounds[1]):
            # What is only counted varies at least as much as if all rows were independent.
            counted = ((exact == bounds[0]) | (exact == bounds[1])).all(0)
            least = (mean - bounds[0]) * (bounds[1] - mean) / self.n_rows
            variance = torch.where(counted, torch.maximum(variance, least), variance)
        return mean, variance

    def of(
        self,
        function: Callable[[Tensor], Tensor],
        values: Tensor,
        bounds: Bounds = ANY,
        *,
        level: float = LEVEL,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The value of a function of column sums, and the ends of its interval.

        Args:
            function: of sums, (..., column) -> (..., result).
            values: (row, column).
        """
        sums = self.sums(values)
        total = sums.sum(0)
        value = function(total)
        return value, *jackknife(value, function(total - sums), self.sizes, bounds, level=level)


def mean_interval(
    values: Tensor, documents: Tensor, bounds: Bounds = ANY, *, level: float = LEVEL
) -> list[Estimate]:
    """Column means of (row, column) with intervals over documents.

    Args:
        values: (row, column).
        documents: the document of each row.
        bounds: values that are possible at all: `SHARE`, `POSITIVE`, ...
        level: how often the interval should contain the truth.
    """
    return Documents(documents).means(values, bounds, level=level)


def jackknife(
    value: Tensor,
    left_out: Tensor,
    sizes: Tensor,
    bounds: Bounds = ANY,
    *,
    centred: bool = False,
    level: float = LEVEL,
) -> tuple[Tensor, Tensor]:
    """The ends of the interval of a value; NaN where leaving out a document leaves none.

    Args:
        value: of all documents, any shape.
        left_out: without each of them: (document, ...).
        sizes: rows of each document.
        bounds: values that are possible at all.
        centred: lay the interval around the value less its bias, for functions that are far from
            linear in few documents; it is stretched to contain the value.
        level: how often the interval should contain the truth.
    """
    if len(sizes) < 2:
        unknown = torch.full_like(value, torch.nan)
        return unknown, unknown
    middle = left_out.mean(0)
    variance = _variance(middle if centred else value, left_out)
    best = value - (len(sizes) - 1) * (middle - value) if centred else value
    counts = math.sqrt(float(sizes.sum()) * len(sizes))
    low, high = ends(best, variance, freedom(sizes), bounds, counts, level)
    return torch.minimum(low, value), torch.maximum(high, value)


def _variance(centre: Tensor, left_out: Tensor) -> Tensor:
    n = len(left_out)
    return (n - 1) / n * (left_out - centre).square().sum(0)


def ends(
    value: Tensor,
    variance: Tensor,
    degrees: float,
    bounds: Bounds,
    counts: float,
    level: float = LEVEL,
) -> tuple[Tensor, Tensor]:
    """The truths from which `value` is no further than Student's t allows: low and high.

    The variance at another truth m is taken as proportional to (m - a) (b - m) for bounds a and b.
    Without any variance, what was never seen may still be a share of all, as large as Wilson's
    interval of 0 in `counts` says, anywhere within the bounds. Rows that are all alike leave open
    how much their documents differ; counting sqrt(rows x documents) is between both extremes.
    """
    t = t_quantile(degrees, level)
    a, b = bounds
    if math.isinf(a):
        reach = t * variance.sqrt()
        return value - reach, value + reach
    above = value - a
    if math.isinf(b):
        pull = t * t * (variance / above).nan_to_num(0.0) / 2
        reach = (t * t * variance + pull.square()).sqrt()
        return value + pull - reach, value + pull + reach
    share = above / (b - a)
    slack = t * t * (variance / (above * (b - value))).nan_to_num(0.0)
    middle, size = (share + slack / 2) / (1 + slack), b - a
    reach = (slack * share * (1 - share) + slack.square() / 4).sqrt() / (1 + slack)
    unseen = t * t / (counts + t * t)
    flat = variance <= 0
    low = torch.where(flat, value - above * unseen, a + size * (middle - reach))
    high = torch.where(flat, value + (b - value) * unseen, a + size * (middle + reach))
    return torch.minimum(low, value), torch.maximum(high, value)


def freedom(sizes: Tensor) -> float:
    """Degrees of freedom of the variance of a mean over documents of these sizes.

    Satterthwaite's, for documents whose means vary alike: n - 1 if they are of equal size, fewer
    if a few hold most of the rows.
    """
    w = sizes.double() / sizes.sum()
    p2, p3, p4, p5 = (float(w.pow(k).sum()) for k in (2, 3, 4, 5))
    mean = p2 - 2 * p3 + p2**2
    spread = p4 - 4 * p5 + 4 * p2 * p4 + p2**4 + 2 * p3**2 - 4 * p2**2 * p3
    degrees = mean**2 / spread if spread > 0 else 1.0
    return min(max(1.0, degrees), max(1.0, len(sizes) - 1.0))


def t_quantile(degrees: float, level: float = LEVEL) -> float:
    """The t within which a share `level` of Student's distribution lies, on both sides of 0."""
    return _t_quantile(round(min(degrees, 1e4), 3), level)  # beyond, it is the normal distribution


@cache
def _t_quantile(degrees: float, level: float) -> float:
    # With t = sqrt(degrees) tan(angle), the density of the angle is cos^(degrees - 1).
    angle = torch.linspace(0, math.pi / 2, 2**15 + 1, dtype=torch.float64)
    density = angle.cos().clamp_min(0).pow(degrees - 1)
    within = torch.cumulative_trapezoid(density, angle)
    place = int(torch.searchsorted(within, level * within[-1]))
    before = float(within[place - 1]) if place else 0.0
    part = (level * float(within[-1]) - before) / (float(within[place]) - before)
    return math.sqrt(degrees) * math.tan((place + part) * float(angle[1]))


def groups_of(documents: Tensor, most: int = GROUPS) -> Tensor:
    """The group of each row: its document, or one of `most` groups that documents are dealt into.

    Every number up to the highest occurs.
    """
    return documents.unique(return_inverse=True)[1] % most


def all_but_one(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of rows without each group in turn, (group, row), and the sizes of groups."""
    sizes = torch.bincount(groups)
    return (groups != torch.arange(len(sizes))[:, None]).double(), sizes.double()


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; honest with few cases, or none that succeed."""
    return learn_library("scipy.stats").binomtest(successes, n).proportion_ci(method="wilson")


def finite(value: float | None) -> float | None:
    """The value, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def percentiles(samples: Tensor, level: float = LEVEL, *, skip_nan: bool = False) -> Tensor:
    """Both ends of the middle `level` of the samples: (sample, ...) -> (2, ...)."""
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=samples.dtype)
    return (samples.nanquantile if skip_nan else samples.quantile)(ends, dim=0)


def resampled(value: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Bias-corrected percentiles of resampled values, for what moves by steps: best of many.

    The percentiles are moved by twice the distance of the value from the median of the samples,
    and stretched to contain the value.
    """
    normal = torch.distributions.Normal(0.0, 1.0)
    below = (samples < value).double().mean(0) + (samples == value).double().mean(0) / 2
    shift = normal.icdf(below.clamp(1 / len(samples), 1 - 1 / len(samples)))
    reach = float(normal.icdf(torch.tensor((1 + LEVEL) / 2)))
    sides = []
    for side in (-reach, reach):
        place = normal.cdf(2 * shift + side) * (len(samples) - 1)
        ordered, lower = samples.sort(0).values, place.floor().long()
        upper = (lower + 1).clamp_max(len(samples) - 1)
        a, b = (ordered.gather(0, index[None])[0] for index in (lower, upper))
        sides.append(a + (place - lower) * (b - a))
    return torch.minimum(sides[0], value), torch.maximum(sides[1], value)


def resample_in_parts(n: int, times: int, seed: int) -> Iterator[Tensor]:
    """How often each of n groups is drawn in each of `times` bootstrap samples: (times, n).

    Some rows at a time; the parts do not depend on their sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    step = max(1, ENTRIES // n)
    for start in range(0, times, step):
        drawn = torch.randint(n, (min(step, times - start), n), generator=generator)
        counts = torch.zeros(drawn.shape, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(counts))


@dataclass(frozen=True)
class NestedEstimate:
    """A mean with its interval, the number of queries of all seeds, and of seeds."""

    value: float
    low: float | None  # None with fewer than two queries
    high: float | None
    rows: int  # of a mean, those that are known
    seeds: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; None for NaN."""
        return {key: finite(value) for key, value in vars(self).items()}


def nested_means(groups: Sequence[Tensor], *, bounds: Bounds = ANY) -> list[NestedEstimate]:
    """Column means over all seeds and queries; NaN counts as not measured."""
    known = [group.isfinite() for group in groups]
    values = [group.double().nan_to_num(0.0, 0.0, 0.0) for group in groups]
    hits = [value * mask for value, mask in zip(values, known, strict=True)]
    means = nested_ratios(hits, known, bounds=bounds)
    rows = torch.cat(known).sum(0).tolist()
    return [
        replace(mean, rows=n) if n > 1 else replace(mean, low=None, high=None, rows=n)
        for mean, n in zip(means, rows, strict=True)
    ]


def nested_ratios(
    hits: Sequence[Tensor], counted: Sequence[Tensor], *, bounds: Bounds = ANY
) -> list[NestedEstimate]:
    """Sums of hits over sums of what is counted, by column; NaN where nothing is counted.

    Args:
        hits: by seed, (query, column).
        counted: like hits.
        bounds: values that are possible at all; intervals end there.
    """
    top, bottom = ([group.double() for group in side] for side in (hits, counted))
    value = torch.cat(top).sum(0) / torch.cat(bottom).sum(0)
    n_queries = sum(len(group) for group in top)
    low = high = torch.full_like(value, torch.nan)
    if n_queries > 1:
        low, high = _over_queries(torch.cat(top), torch.cat(bottom), bounds)
        margin = _seed_margin(top, bottom)
        low = torch.minimum(low, (value - margin).clamp(*bounds))
        high = torch.maximum(high, (value + margin).clamp(*bounds))
    return [
        NestedEstimate(mean, finite(a), finite(b), n_queries, len(top))
        for mean, a, b in zip(value.tolist(), low.tolist(), high.tolist(), strict=True)
    ]


def _seed_margin(top: list[Tensor], bottom: list[Tensor]) -> Tensor:
    """Half of the t-interval over the ratios of seeds, by column; 0 with fewer than two seeds."""
    ratios = torch.stack([a.sum(0) / b.sum(0) for a, b in zip(top, bottom, strict=True)])
    margins = torch.zeros(ratios.shape[1], dtype=torch.float64)
    for column, by_seed in enumerate(ratios.unbind(1)):
        known = by_seed[by_seed.isfinite()]
        if len(known) > 1:
            margins[column] = t_quantile(len(known) - 1) * known.std() / math.sqrt(len(known))
    return margins


def _over_queries(hits: Tensor, counted: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """The ends of intervals over queries of all seeds, by column."""
    intervals = []
    for top, bottom in zip(hits.T, counted.T, strict=True):
        known = bottom > 0  # a query that counts nothing says nothing
        top, bottom = top[known], bottom[known]
        value, left_out = top.sum() / bottom.sum(), (top.sum() - top) / (bottom.sum() - bottom)
        intervals.append(torch.stack(jackknife(value, left_out, bottom, bounds)))
    low, high = torch.stack(intervals, dim=1)
    return low, high
