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

from layerleap.lens import all_but_one, finite, groups_of, jackknife
from layerleap.models.weights import dual, gram
from layerleap.study import Row
from layerleap_papers.embedding_space.tokens import ENTRIES

INVERSES = ("transposed", "pseudo-inverse")
COLUMNS = 4096  # tokens at a time


def sizes(d_vocab: int, first: int = 16) -> list[int]:
    """How many tokens to keep: powers of 2 from `first` on, and all; fewer of few tokens."""
    while first > max(1, d_vocab // 8):
        first //= 2
    powers = [first]
    while 2 * powers[-1] < d_vocab:
        powers.append(2 * powers[-1])
    return [*powers, d_vocab]


@dataclass(frozen=True, eq=False)
class Kept:
    """Cosines of one set of rows, and what they are without each of its groups."""

    ks: list[int]
    n_rows: int
    sizes: Tensor  # of groups
    value: Tensor  # (inverse, k)
    left_out: Tensor  # (group, inverse, k)

    def rows(self) -> Iterator[Row]:
        """A row per inverse and k, and the lead of the transposed matrix."""
        lead = self.value[0] - self.value[1], self.left_out[:, 0] - self.left_out[:, 1]
        named = [(name, self.value[n], self.left_out[:, n]) for n, name in enumerate(INVERSES)]
        for name, value, left_out in [*named, ("lead", *lead)]:
            yield from self.interval_rows(value, left_out, name)

    def crossing(self) -> Row:
        """The k at which the pseudo-inverse overtakes the transposed matrix."""
        value = crossings(self.ks, (self.value[0] - self.value[1])[None])[0]
        left_out = crossings(self.ks, self.left_out[:, 0] - self.left_out[:, 1])
        # Curves cross at some number of tokens, and are drawn over its logarithm.
        low, high = (end.exp() for end in jackknife(value.log(), left_out.log(), self.sizes))
        return {
            "value": finite(float(value)),
            "low": finite(float(low)),
            "high": finite(float(high)),
            "rows": self.n_rows,
            "crosses": float((~left_out.isnan()).double().mean()),
        }

    def interval_rows(self, value: Tensor, left_out: Tensor, inverse: str) -> Iterator[Row]:
        """Rows with intervals: values (k,), and those without each group: (group, k)."""
        low, high = (end.tolist() for end in jackknife(value, left_out, self.sizes))
        for place, k in enumerate(self.ks):
            ends = {"low": finite(low[place]), "high": finite(high[place])}
            value_at = float(value[place])
            yield {"inverse": inverse, "k": k, "value": value_at, **ends, "rows": self.n_rows}


@torch.no_grad()
def keep_best(
    rows: Tensor, matrix: Tensor, ks: Sequence[int], *, groups: Tensor | None = None
) -> Kept:
    """Cosines for all k and both inverses; `BadSettings` if E has no right inverse.

    `groups` says which rows belong together; by default each stands alone.
    """
    place = groups_of(torch.arange(len(rows)) if groups is None else groups)
    rows = torch.nn.functional.normalize(rows.to(matrix), dim=1)
    duals = dual(rows, matrix, gram(matrix)).to(rows)
    exact = (rows.double() @ rows.double().T).cpu()
    others, sizes = all_but_one(place)
    weights = torch.cat([torch.ones(1, len(rows), dtype=torch.float64), others])
    by_inverse = [
        torch.stack([_cosine(exact, made.double().cpu(), weights) for made in by_k], dim=1)
        for by_k in products(rows, duals, matrix, ks)
    ]
    cosines = torch.stack(by_inverse, dim=1)  # (1 + group, inverse, k)
    return Kept(list(ks), len(rows), sizes, cosines[0], cosines[1:])


def products(rows: Tensor, duals: Tensor, matrix: Tensor, ks: Sequence[int]) -> Tensor:
    """Inner products of kept readings: (inverse, k, row, row)."""
    limits, dual_limits = (_limits(vectors, matrix, ks) for vectors in (rows, duals))
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
    """The cosine of two matrices over pairs of rows, for rows that count `weights`: (sample,)."""
    ab, aa, bb = (_total(pairs, weights) for pairs in (a * b, a * a, b * b))
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
