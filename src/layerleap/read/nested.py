"""Means with intervals over queries and seeds.

In: by seed, values of (query, column). Out: a `NestedEstimate` per column.

A bootstrap sample draws seeds, and for each of them queries, both with replacement: an interval
then covers other demonstrations as well as other queries. With one seed, it is over queries alone.

Few seeds resampled vary too little, and a query that several seeds draw counts as several. So an
interval also spans Student's t-interval over the means of seeds, which is wide for few seeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from layerleap.read.metrics import finite, percentiles

RESAMPLES = 1000
LEVEL = 0.95  # of intervals
ANY = (-math.inf, math.inf)


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
        ends = {key: finite(getattr(self, key)) for key in ("value", "low", "high")}
        return {**ends, "rows": self.rows, "seeds": self.seeds}


def nested_means(
    groups: Sequence[Tensor],
    *,
    bounds: tuple[float, float] = ANY,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[NestedEstimate]:
    """Column means over all seeds and queries; NaN counts as not measured."""
    known = [group.isfinite() for group in groups]
    values = [group.double().nan_to_num(0.0, 0.0, 0.0) for group in groups]
    hits = [value * mask for value, mask in zip(values, known, strict=True)]
    found = nested_ratios(hits, known, bounds=bounds, resamples=resamples, seed=seed)
    rows = torch.cat(known).sum(0).tolist()
    return [
        replace(one, rows=n) if n > 1 else replace(one, low=None, high=None, rows=n)
        for one, n in zip(found, rows, strict=True)
    ]


def nested_ratios(
    hits: Sequence[Tensor],
    counted: Sequence[Tensor],
    *,
    bounds: tuple[float, float] = ANY,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[NestedEstimate]:
    """Sums of hits over sums of what is counted, by column; NaN where nothing is counted.

    Args:
        hits: by seed, (query, column).
        counted: like hits.
        bounds: values that are possible at all; intervals end there.
        resamples: bootstrap samples.
        seed: of the samples.
    """
    top, bottom = ([group.double() for group in side] for side in (hits, counted))
    value = torch.cat(top).sum(0) / torch.cat(bottom).sum(0)
    n_queries = sum(len(group) for group in top)
    low = high = None
    if n_queries > 1:
        samples = _resampled(top, bottom, resamples, seed)
        low, high = percentiles(samples, skip_nan=True)
        margin = _seed_margin(top, bottom)
        low = torch.minimum(low, (value - margin).clamp(*bounds))
        high = torch.maximum(high, (value + margin).clamp(*bounds))
    return [
        NestedEstimate(
            float(value[column]),
            None if low is None else float(low[column]),
            None if high is None else float(high[column]),
            n_queries,
            len(top),
        )
        for column in range(len(value))
    ]


def _seed_margin(top: list[Tensor], bottom: list[Tensor]) -> Tensor:
    """Half of the t-interval over the ratios of seeds, by column; 0 with fewer than two seeds."""
    ratios = torch.stack([a.sum(0) / b.sum(0) for a, b in zip(top, bottom, strict=True)])
    margins = torch.zeros(ratios.shape[1], dtype=torch.float64)
    for column, own in enumerate(ratios.unbind(1)):
        known = own[own.isfinite()]
        if len(known) > 1:
            margins[column] = t_quantile(len(known) - 1) * known.std() / math.sqrt(len(known))
    return margins


@cache
def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t within which a share `level` of Student's distribution lies, on both sides of 0."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_within(angle, freedom) < level else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _t_within(angle: float, freedom: int) -> float:
    """The share within t = sqrt(freedom) tan(angle): a finite sum for whole degrees of freedom."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if odd else share


def _resampled(top: list[Tensor], bottom: list[Tensor], resamples: int, seed: int) -> Tensor:
    """The ratio in every bootstrap sample: (sample, column)."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(2, resamples, top[0].shape[1], dtype=torch.float64)
    for _ in top:  # as many seeds as there are
        chosen = torch.randint(len(top), (resamples,), generator=generator)
        for group, pair in enumerate(zip(top, bottom, strict=True)):
            samples, n = (chosen == group).nonzero()[:, 0], len(pair[0])
            drawn = torch.randint(n, (len(samples), n), generator=generator)
            weights = torch.zeros(len(samples), n, dtype=torch.float64)
            weights.scatter_add_(1, drawn, torch.ones_like(weights))
            for side, values in enumerate(pair):
                sums[side, samples] += weights @ values
    return sums[0] / sums[1]
