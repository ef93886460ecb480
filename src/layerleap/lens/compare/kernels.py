"""Exact Pearson correlation of vectors of two models, from a few small matrices.

In: the output matrices of two models with one vocabulary, then vectors of both.
Out: two sets of rows whose inner products are the correlations.

Vectors x of model A and y of model B become scores of N tokens, E_A x and E_B y. Over the tokens,
their correlation (arXiv 2209.02535, section 4.1) is

    x C_AB y / sqrt(x C_AA x * y C_BB y),    C_AB = E_A^T E_B / N - mean(E_A) mean(E_B)^T

so that no row of N numbers is formed. The covariances are float64. `left` and `right` rotate the
vectors so that all of them have at most unit length: their products are then exact to float32
although the covariances are badly conditioned (one direction dominates real output matrices).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from layerleap.models.weights import known_tokens

PIECE_BYTES = 2**26  # of the float64 rows of one matrix that are multiplied at a time


class Comparison(Protocol):
    """Where rows of two models are compared: `left(x) @ right(y).T` are correlations."""

    @property
    def width(self) -> int:
        """Of the rows that `left` and `right` return."""

    def left(self, rows: Tensor) -> Tensor:
        """Rows of model A, ready to be multiplied: (n, d_a) -> (n, width), float32."""

    def right(self, rows: Tensor) -> Tensor:
        """Rows of model B: (n, d_b) -> (n, width), float32."""


@dataclass(frozen=True)
class Vocabulary:
    """Rows compared by the scores that they give to all tokens, or to some of them."""

    n_tokens: int
    aa: Tensor  # covariances of the columns over tokens, float64: (d_a, d_a)
    ab: Tensor  # (d_a, d_b)
    bb: Tensor  # (d_b, d_b)
    carry: Tensor  # (d_a, width): C_AB W^-1, where C_BB = W W^T
    root: Tensor  # (d_b, width): W

    @classmethod
    def of(cls, a: Tensor, b: Tensor, tokens: Tensor | None = None) -> "Vocabulary":
        """From the output matrices, (d_vocab, d_a) and (d_vocab, d_b); `known_tokens` when None."""
        chosen = known_tokens(a, b) if tokens is None else tokens
        means = [_mean(matrix, chosen) for matrix in (a, b)]
        aa, ab, bb = (
            torch.zeros(m.shape[1], n.shape[1], dtype=torch.float64)
            for m, n in ((a, a), (a, b), (b, b))
        )
        for part in _parts(chosen, max(a.shape[1], b.shape[1])):
            x, y = (_rows(m, part) - mean for m, mean in zip((a, b), means, strict=True))
            aa += x.T @ x
            ab += x.T @ y
            bb += y.T @ y
        n = len(chosen)
        aa, ab, bb = aa / n, ab / n, bb / n
        carry, root = _rotation(ab, bb)
        return cls(n, aa, ab, bb, carry, root)

    @property
    def width(self) -> int:
        """The rank of C_BB: directions in which model B tells tokens apart."""
        return self.root.shape[1]

    def left(self, rows: Tensor) -> Tensor:
        """Rows of model A, ready to be multiplied; 0 where all tokens get one score."""
        x = rows.double().cpu()
        variance = ((x @ self.aa) * x).sum(1, keepdim=True)
        return _scaled(x @ self.carry, variance)

    def right(self, rows: Tensor) -> Tensor:
        """Rows of model B; each has unit length, or is 0 where all tokens get one score."""
        y = rows.double().cpu() @ self.root
        return _scaled(y, y.square().sum(1, keepdim=True))


@dataclass(frozen=True)
class Raw:
    """Rows compared coordinate by coordinate: the control, which a rotation of B defeats."""

    width: int

    def left(self, rows: Tensor) -> Tensor:
        """Rows centred over their coordinates, with unit length."""
        x = rows.double().cpu()
        x = x - x.mean(1, keepdim=True)
        return _scaled(x, x.square().sum(1, keepdim=True))

    right = left


def _scaled(rows: Tensor, variance: Tensor) -> Tensor:
    """Rows by the root of their variance; rows without any stay 0, and correlate with nothing."""
    size = torch.where(variance > 0, variance, torch.inf).rsqrt()
    return (rows * size).float()


def _rotation(ab: Tensor, bb: Tensor) -> tuple[Tensor, Tensor]:
    """C_AB W^-1 and W, where W W^T = C_BB.

    Directions in which B's matrix does not vary are left out. The products do not need them: C_AB
    has nothing there either.
    """
    values, vectors = torch.linalg.eigh(bb)
    kept = values > values[-1].clamp_min(0) * len(values) * torch.finfo(torch.float64).eps
    roots, basis = values[kept].sqrt(), vectors[:, kept]
    return (ab @ basis) / roots, basis * roots


def _mean(matrix: Tensor, chosen: Tensor) -> Tensor:
    parts = (_rows(matrix, part).sum(0) for part in _parts(chosen, matrix.shape[1]))
    return torch.stack(list(parts)).sum(0) / len(chosen)


def _parts(chosen: Tensor, width: int) -> Iterator[Tensor]:
    yield from chosen.split(_step(width))


def _step(width: int) -> int:
    return max(1, PIECE_BYTES // (8 * width))


def _rows(matrix: Tensor, part: Tensor) -> Tensor:
    return matrix[part.to(matrix.device)].double().cpu()
