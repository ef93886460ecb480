"""Means with intervals over queries and seeds.

In: by seed, values of (query, column). Out: a `NestedEstimate` per column.

An interval over the queries of all seeds covers other queries. To cover other demonstrations as
well, it is stretched to Student's t-interval over the means of seeds, which is wide for few seeds;
and a query that several seeds draw counts as several in the first, but not in the second.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerleap.lens.intervals import ANY, Bounds, finite, jackknife, t_quantile


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
    bounds: Bounds = ANY,
) -> list[NestedEstimate]:
    """Column means over all seeds and queries; NaN counts as not measured."""
    known = [group.isfinite() for group in groups]
    values = [group.double().nan_to_num(0.0, 0.0, 0.0) for group in groups]
    hits = [value * mask for value, mask in zip(values, known, strict=True)]
    found = nested_ratios(hits, known, bounds=bounds)
    rows = torch.cat(known).sum(0).tolist()
    return [
        replace(one, rows=n) if n > 1 else replace(one, low=None, high=None, rows=n)
        for one, n in zip(found, rows, strict=True)
    ]


def nested_ratios(
    hits: Sequence[Tensor],
    counted: Sequence[Tensor],
    *,
    bounds: Bounds = ANY,
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
    low = high = None
    if n_queries > 1:
        low, high = _over_queries(torch.cat(top), torch.cat(bottom), bounds)
        margin = _seed_margin(top, bottom)
        low = torch.minimum(low, (value - margin).clamp(*bounds))
        high = torch.maximum(high, (value + margin).clamp(*bounds))
    return [
        NestedEstimate(
            float(value[column]),
            None if low is None else finite(float(low[column])),
            None if high is None else finite(float(high[column])),
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


def _over_queries(hits: Tensor, counted: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """The ends of intervals over queries of all seeds, by column."""
    found = []
    for top, bottom in zip(hits.T, counted.T, strict=True):
        known = bottom > 0  # a query that counts nothing says nothing
        top, bottom = top[known], bottom[known]
        value, left_out = top.sum() / bottom.sum(), (top.sum() - top) / (bottom.sum() - bottom)
        found.append(torch.stack(jackknife(value, left_out, bottom, bounds)))
    low, high = torch.stack(found, dim=1)
    return low, high
