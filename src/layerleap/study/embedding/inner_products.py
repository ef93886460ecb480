"""What is left of inner products when only the top k tokens of each vector are kept.

In: rows x, the output matrix E, and its duals. Out: the cosine of X X^T with the products of
readings of which all but the k entries of largest magnitude are set to 0, for both inverses of E:

    transposed       keep_k(X E^T) keep_k(X E^T)^T
    pseudo-inverse   keep_k(X E^T) keep_k(X' E^T)^T     X' = X (E^T E)^-1, exact if all are kept

Vectors have unit length, so that each counts the same. Vectors of one group, such as the states of
a document, are drawn together. The readings of a few rows, or of all rows
in a few tokens, are held at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.models.weights import dual, gram
from layerleap.read.metrics import finite, percentiles, resample
from layerleap.study.embedding.tokens import ENTRIES
from layerleap.study.result import Row

INVERSES = ("transposed", "pseudo-inverse")
COLUMNS = 4096  # tokens at a time
RESAMPLES = 1000


def sizes(d_vocab: int, first: int = 16) -> list[int]:
    """How many tokens to keep: powers of 2 from `first` on, and all; fewer of few tokens."""
    while first > max(1, d_vocab // 8):
        first //= 2
    found = [first]
    while 2 * found[-1] < d_vocab:
        found.append(2 * found[-1])
    return [*found, d_vocab]


@dataclass(frozen=True, eq=False)
class Kept:
    """Cosines of one set of rows, with bootstrap samples of its groups."""

    ks: list[int]
    n_rows: int
    n_groups: int
    value: Tensor  # (inverse, k)
    draws: Tensor  # (sample, inverse, k)

    def rows(self) -> Iterator[Row]:
        """A row per inverse and k, and the lead of the transposed matrix."""
        lead = self.value[0] - self.value[1], self.draws[:, 0] - self.draws[:, 1]
        named = [(name, self.value[n], self.draws[:, n]) for n, name in enumerate(INVERSES)]
        for name, value, draws in [*named, ("lead", *lead)]:
            yield from self.interval_rows(value, draws, name)

    def crossing(self) -> Row:
        """The k at which the pseudo-inverse overtakes the transposed matrix."""
        value = crossings(self.ks, (self.value[0] - self.value[1])[None])
        draws = crossings(self.ks, self.draws[:, 0] - self.draws[:, 1])
        known = ~draws.isnan()
        is_known = bool(known.all()) and self.n_groups > 1
        low, high = percentiles(draws).tolist() if is_known else (None, None)
        return {
            "value": finite(float(value)), "low": low, "high": high, "rows": self.n_rows,
            "crosses": float(known.double().mean()),
        }  # fmt: skip

    def interval_rows(self, value: Tensor, draws: Tensor, inverse: str) -> Iterator[Row]:
        """Rows with intervals: values (k,) and samples (sample, k)."""
        low, high = percentiles(draws).tolist()
        for place, k in enumerate(self.ks):
            ends = {"low": low[place], "high": high[place]}
            ends = ends if self.n_groups > 1 else dict.fromkeys(ends)
            value_at = float(value[place])
            yield {"inverse": inverse, "k": k, "value": value_at, **ends, "rows": self.n_rows}


@torch.no_grad()
def keep_best(
    rows: Tensor, matrix: Tensor, ks: Sequence[int], *, seed: int, groups: Tensor | None = None
) -> Kept:
    """Cosines for all k and both inverses; `BadSettings` if E has no right inverse.

    `groups` says which rows are drawn together; by default each is drawn alone.
    """
    names, place = (torch.arange(len(rows)) if groups is None else groups).unique(
        return_inverse=True
    )
    rows = torch.nn.functional.normalize(rows.to(matrix), dim=1)
    duals = dual(rows, matrix, gram(matrix)).to(rows)
    exact = (rows.double() @ rows.double().T).cpu()
    weights = torch.cat([torch.ones(1, len(rows), dtype=torch.float64),
                         resample(len(names), RESAMPLES, seed)[:, place]])  # fmt: skip
    found = [
        torch.stack([_cosine(exact, made.double().cpu(), weights) for made in by_k], dim=1)
        for by_k in products(rows, duals, matrix, ks)
    ]
    cosines = torch.stack(found, dim=1)  # (1 + sample, inverse, k)
    return Kept(list(ks), len(rows), len(names), cosines[0], cosines[1:])


def products(rows: Tensor, duals: Tensor, matrix: Tensor, ks: Sequence[int]) -> Tensor:
    """Inner products of kept readings: (inverse, k, row, row)."""
    limits, dual_limits = (_limits(each, matrix, ks) for each in (rows, duals))
    total = rows.new_zeros(len(INVERSES), len(ks), len(rows), len(rows))
    for part in matrix.split(COLUMNS):
        scores, dual_scores = rows @ part.T, duals @ part.T
        for place in range(len(ks)):
            kept = _kept(scores, limits[:, place])
            total[0, place].addmm_(kept, kept.T)
            total[1, place].addmm_(kept, _kept(dual_scores, dual_limits[:, place]).T)
    return total


def _kept(scores: Tensor, limits: Tensor) -> Tensor:
    return scores * (scores.abs() >= limits[:, None])


def _limits(rows: Tensor, matrix: Tensor, ks: Sequence[int]) -> Tensor:
    """Below which magnitude an entry of each row is set to 0: (row, k)."""
    last = torch.tensor(ks, device=rows.device)
    parts = []
    for part in rows.split(max(1, ENTRIES // len(matrix))):
        sizes = (part @ matrix.T).abs_().sort(dim=1, descending=True).values
        sizes = torch.nn.functional.pad(sizes, (0, 1))  # if all are kept, none is left out
        # Half-way to the next one: products of other blocks round differently.
        parts.append((sizes[:, last - 1] + sizes[:, last]) / 2)
    return torch.cat(parts)


def _cosine(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """The cosine of two matrices over pairs of rows, for rows drawn `weights` times: (sample,).

    A row that is drawn twice makes no pair with itself beyond its own inner product.
    """
    ab, aa, bb = (_total(each, weights) for each in (a * b, a * a, b * b))
    return ab / (aa * bb).sqrt()


def _total(pairs: Tensor, weights: Tensor) -> Tensor:
    diagonal = pairs.diagonal()
    apart = pairs - diagonal.diag()
    return torch.linalg.vecdot(weights @ apart, weights) + weights @ diagonal


def crossings(ks: Sequence[int], leads: Tensor) -> Tensor:
    """Where each lead falls to 0 first, interpolated in log k: (sample, k) -> (sample,); or NaN."""
    falls = (leads[:, :-1] > 0) & (leads[:, 1:] <= 0)
    first = falls.int().argmax(1, keepdim=True)
    before, after = leads.gather(1, first), leads.gather(1, first + 1)
    logs = torch.tensor(ks, dtype=torch.float64).log()
    step = (before / (before - after)) * (logs[first + 1] - logs[first])
    return (logs[first] + step).exp().where(falls.any(1, keepdim=True), torch.nan)[:, 0]
