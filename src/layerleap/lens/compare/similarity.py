"""How similar every block of one model is to every block of another, by one kind of vector.

In: the output matrices of two models with one vocabulary, then vectors of both. Out: the mean and
the best |correlation| of each pair of blocks. Correlations exist for one pair of blocks at a time,
in pieces; of A's vectors, as many blocks are ready at a time as fit.

Vectors x of model A and y of model B become scores of N tokens, E_A x and E_B y. Over the tokens,
their correlation (arXiv 2209.02535, section 4.1) is

    x C_AB y / sqrt(x C_AA x * y C_BB y),    C_AB = E_A^T E_B / N - mean(E_A) mean(E_B)^T

so that no row of N numbers is formed. The covariances are float64. `left` and `right` rotate the
vectors so that all of them have at most unit length: their products are then exact to float32
although the covariances are badly conditioned (one direction dominates real output matrices).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.errors import ModelRefused
from layerleap.lens.compare.alignment import Measure, SpaceName
from layerleap.models.transformer import Transformer
from layerleap.models.weights import (
    all_heads,
    feed_forwards,
    kinds,
    known_tokens,
    refusals,
    vectors,
)

# Multiplications of all products in a space; where there are more, rows of A are drawn at random.
# 1e12 take about 15 s on two cores. The control may be coarser than what it controls.
AFFORDABLE: dict[SpaceName, float] = {"vocabulary": 5e12, "raw": 1e12}
PIECE_BYTES = 2**26  # of the rows of one matrix, or of the correlations, that exist at a time
READY_BYTES = 2**29  # of the rows of A that are ready at a time
Blocks = Mapping[str, tuple[list[int], list[int]]]  # by kind, the blocks of both models


@dataclass(frozen=True)
class Vocabulary:
    """Rows compared by the scores that they give to all tokens, or to some of them.

    `left(x) @ right(y).T` are the correlations of rows of model A with rows of model B.
    """

    n_tokens: int
    aa: Tensor  # covariances of the columns of A over tokens, float64: (d_a, d_a)
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
        return cls(n, aa / n, *_rotation(ab / n, bb / n))

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


Comparison = Vocabulary | Raw


def _scaled(rows: Tensor, variance: Tensor) -> Tensor:
    """Rows by the root of their variance; rows without any stay 0, and correlate with nothing."""
    size = torch.where(variance > 0, variance, torch.inf).rsqrt()
    return (rows * size).float()


def _rotation(ab: Tensor, bb: Tensor) -> tuple[Tensor, Tensor]:
    """C_AB W^-1 and W, where W W^T = C_BB.

    Directions in which B's matrix does not vary are left out. The products do not need them: C_AB
    has nothing there either.
    """
    values, basis = torch.linalg.eigh(bb)
    varies = values > values[-1].clamp_min(0) * len(values) * torch.finfo(torch.float64).eps
    roots, basis = values[varies].sqrt(), basis[:, varies]
    return (ab @ basis) / roots, basis * roots


def _mean(matrix: Tensor, chosen: Tensor) -> Tensor:
    parts = (_rows(matrix, part).sum(0) for part in _parts(chosen, matrix.shape[1]))
    return torch.stack(list(parts)).sum(0) / len(chosen)


def _parts(chosen: Tensor, width: int) -> tuple[Tensor, ...]:
    return chosen.split(max(1, PIECE_BYTES // (8 * width)))


def _rows(matrix: Tensor, part: Tensor) -> Tensor:
    return matrix[part.to(matrix.device)].double().cpu()


class Side:
    """The vectors of one model, block by block."""

    def __init__(self, transformer: Transformer, fold: bool) -> None:
        self.transformer, self.fold, self.name = transformer, fold, transformer.identity.name
        feed_forwards(transformer)  # all blocks in one pass
        all_heads(transformer)
        blocks = range(1, transformer.n_layers + 1)
        self.kinds = {block: kinds(transformer, block) for block in blocks}

    def blocks(self, kind: str) -> list[int]:
        """The blocks with vectors of that kind."""
        return [block for block, known in self.kinds.items() if kind in known]

    def missing(self) -> dict[str, str]:
        """Why some blocks lack vectors."""
        reasons = {block: "; ".join(refusals(self.transformer, block)) for block in self.kinds}
        return {f"block {block} of {self.name}": why for block, why in reasons.items() if why}

    def why_not(self, kind: str) -> str:
        """Why no block has vectors of that kind."""
        try:
            vectors(self.transformer, 1, kind, fold=self.fold)
        except ModelRefused as error:
            return str(error)
        return ""

    def count(self, kind: str, block: int) -> int:
        """How many vectors of a kind a block has."""
        return len(vectors(self.transformer, block, kind))

    def rows(self, kind: str, block: int, drawn: int | None = None, seed: int = 0) -> Tensor:
        """The vectors of a block, (n, d_model); at most `drawn` of them, at random."""
        rows = vectors(self.transformer, block, kind, fold=self.fold)
        if drawn is None or drawn >= len(rows):
            return rows
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(rows), generator=generator)[:drawn]
        return rows[order.sort().values.to(rows.device)]


def affordable_rows(
    a: Side, b: Side, blocks: Blocks, width: int, rows: int | None, limit: float
) -> int | None:
    """How many vectors of A per block and kind to draw; None if all of them are compared.

    Vectors of B are never left out: the best match of a vector of A may be any of them. `rows` is
    the number that the caller chose; None draws as many as stay below `limit` multiplications.
    """
    counts = {
        kind: ([a.count(kind, block) for block in in_a], [b.count(kind, block) for block in in_b])
        for kind, (in_a, in_b) in blocks.items()
    }

    def cost(rows: int) -> float:
        return sum(width * sum(min(rows, n) for n in x) * sum(y) for x, y in counts.values())

    most = max(max(x) for x, _ in counts.values())
    if rows is None:
        rows = most if cost(most) <= limit else 64
        while rows < most and cost(2 * rows) <= limit:
            rows *= 2
    return rows if rows < most else None


@torch.no_grad()
def similarities(
    space: Comparison,
    a: Side,
    b: Side,
    kind: str,
    both: Sequence[list[int]],
    draw: tuple[int | None, int],
    tick: Callable[[], None],
) -> dict[Measure, Tensor]:
    """The best and the mean |correlation| of all pairs of blocks: (n_a, n_b) each, float64.

    `draw` is how many vectors of A to take from a block (all when None), and the seed.
    """
    in_a, in_b = both
    best = torch.zeros(len(in_a), len(in_b), dtype=torch.float64)
    mean = torch.zeros_like(best)
    for ready in _ready(space, a, kind, in_a, draw):
        for column, block in enumerate(in_b):
            right = space.right(b.rows(kind, block))
            for row, left in ready.items():
                best[row, column], mean[row, column] = _compare(left, right)
                tick()
    return {"best": best, "mean": mean}


def _ready(
    space: Comparison, side: Side, kind: str, blocks: Sequence[int], draw: tuple[int | None, int]
) -> Iterator[dict[int, Tensor]]:
    """Blocks of A ready to be multiplied, by their place; as many at a time as fit."""
    ready: dict[int, Tensor] = {}
    for place, block in enumerate(blocks):
        ready[place] = space.left(side.rows(kind, block, *draw))
        if sum(4 * left.numel() for left in ready.values()) >= READY_BYTES:
            yield ready
            ready = {}
    if ready:
        yield ready


def _compare(left: Tensor, right: Tensor) -> tuple[float, float]:
    """The mean over left rows of the largest |product|, and the mean |product| of all pairs."""
    total, best = 0.0, torch.zeros(len(left))
    for part in right.split(max(1, PIECE_BYTES // (4 * len(left)))):
        products = (left @ part.T).abs_()
        total += float(products.sum())
        best = torch.maximum(best, products.amax(1))
    # Rounding may leave the product of equal vectors a hair above 1.
    return float(best.double().mean().clamp(max=1.0)), total / (len(left) * len(right))
