"""Strict Kendall tau of saturation layers, and the two nulls it has to beat.

In: saturation layers, (row, k), and those of random walks. Out: values per row, and p-values.

With m the last rank that saturates before the last layer, and only where m >= 3,
    tau = (C - D) / (m (m - 1) / 2),   C = pairs i < j <= m with s_i < s_j, D = all other pairs
Ties count as out of order, so chance gives less than 0: the value alone says nothing.

*Exchangeable* ranks: all layers of a row are permuted, before the filter on s_1 and before the cut
to m, both of which look at the ranks. (Permuting what they leave, as the paper's code does, makes
order out of nothing.) *Random walk*: see `read/random_walks.py`. Under that null, a row and its
double are exchangeable, so whole documents are swapped. Permuting treats rows as independent, which
those of one document are not: use intervals over documents as well to decide whether a null is
beaten. All p-values are one-sided, (count + 1) / (draws + 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.lens import Documents, finite, jackknife, percentiles

FEWEST_RANKS = 3  # that must saturate for a row to have a tau
ENTRIES = 2**22  # layers held at a time while permuting
ROUNDING = 1e-12  # a draw that equals the value counts, whatever the order of its sum


@dataclass(frozen=True)
class Cell:
    """Which ranks of which rows are compared."""

    first: int = 0  # the first rank, counted from 0: 1 leaves the top token out
    limit: int | None = None  # only rows with s_1 at most this; all when None


def strict_tau(layers: Tensor, n_layers: int) -> Tensor:
    """Strict tau of each row: (..., k) -> (...); NaN where fewer than 3 ranks can be compared."""
    k = layers.shape[-1]
    ranks = torch.arange(1, k + 1, device=layers.device)
    m = torch.where(layers != n_layers, ranks, 0).amax(-1)
    first, second = torch.triu_indices(k, k, 1)
    rising = (layers[..., first] < layers[..., second]) & (second < m[..., None])
    pairs = m * (m - 1) / 2
    tau = 2 * rising.sum(-1) / pairs.clamp_min(1) - 1
    return tau.where(m >= FEWEST_RANKS, torch.nan)


def taus(layers: Tensor, n_layers: int, cell: Cell) -> Tensor:
    """Strict tau of the rows and ranks of a cell; NaN for all other rows."""
    tau = strict_tau(layers[..., cell.first :], n_layers)
    return tau if cell.limit is None else tau.where(layers[..., 0] <= cell.limit, torch.nan)


def exchangeable(
    layers: Tensor, n_layers: int, cell: Cell, *, draws: int, seed: int = 0
) -> dict[str, Any]:
    """Mean and range of the mean tau under permuted ranks, and the p-value of the real one."""
    real = taus(layers, n_layers, cell).double().nanmean()
    null = torch.cat(list(_permuted(layers, n_layers, cell, draws, seed)))
    low, high = percentiles(null, skip_nan=True).tolist()
    return {
        "mean": finite(float(null.nanmean())),
        "low": finite(low),
        "high": finite(high),
        "p": p_value(null, real),
        "draws": draws,
    }


def _permuted(layers: Tensor, n_layers: int, cell: Cell, draws: int, seed: int) -> Iterator[Tensor]:
    """Mean taus of all draws, some at a time."""
    generator = torch.Generator().manual_seed(seed)
    size = max(1, ENTRIES // layers.numel())
    # The layer of a top token that is left out is not permuted: it only selects rows.
    fixed, free = layers[:, : cell.first], layers[:, cell.first :]
    for start in range(0, draws, size):
        n = min(size, draws - start)
        order = torch.rand(n, *free.shape, generator=generator).argsort(-1)
        moved = free.expand(n, -1, -1).gather(-1, order)
        drawn = torch.cat([fixed.expand(n, -1, -1), moved], dim=-1)
        yield taus(drawn, n_layers, cell).double().nanmean(-1)


def against_walk(
    layers: Tensor,
    walk: Tensor,
    documents: Tensor,
    n_layers: int,
    cell: Cell,
    *,
    draws: int,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean taus of real rows and of their doubles, the difference with interval, and p-value.

    `layers` and `walk` are those of the rows and of the double of each: (row, k). The interval
    is that of the difference, over documents; the test swaps them whole, `draws` times.
    """
    by_document = Documents(documents)
    columns = torch.cat([_columns(taus(x, n_layers, cell)) for x in (layers, walk)], dim=1)
    sums = by_document.sums(columns)
    total, change = sums.sum(0), sums.roll(2, dims=1) - sums  # if a document and its double swap
    difference = _difference(total)
    generator = torch.Generator().manual_seed(seed)
    size = max(1, ENTRIES // len(sums))
    swaps = (
        torch.randint(2, (min(size, draws - start), len(sums)), generator=generator).double()
        for start in range(0, draws, size)
    )
    null = torch.cat([_difference(total + swap @ change) for swap in swaps])
    low, high = jackknife(difference, _difference(total - sums), by_document.sizes, (-2.0, 2.0))
    return {
        "rows": int(total[1]),
        "doubles": int(total[3]),
        "documents": len(sums),
        "value": finite(float(total[0] / total[1])),
        "mean": finite(float(total[2] / total[3])),
        "difference": finite(float(difference)),
        "difference_low": finite(float(low)),
        "difference_high": finite(float(high)),
        "p": p_value(null, difference),
        "draws": draws,
    }


def _columns(tau: Tensor) -> Tensor:
    """Tau, 0 where there is none, and whether there is one: (row, 2)."""
    return torch.stack([tau.nan_to_num(0.0), ~tau.isnan()], dim=1)


def _difference(sums: Tensor) -> Tensor:
    """Mean of the rows minus mean of their doubles, from sums of all four columns."""
    return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]


def p_value(null: Tensor, value: Tensor) -> float:
    """The share of draws at least as high as the value, which counts as one of them."""
    reached = ~(null < value - ROUNDING)  # a draw without any row, NaN, counts against us
    return (int(reached.sum()) + 1) / (len(null) + 1)
