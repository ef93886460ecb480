"""How similar every block of one model is to every block of another, by one kind of vector.

In: the vectors of both models, and a space to compare them in.
Out: the mean and the best |correlation| of each pair of blocks. Correlations exist for one pair of
blocks at a time, in pieces; of A's vectors, as many blocks are kept ready as fit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from layerleap.errors import ModelRefused
from layerleap.lens.compare.kernels import Comparison
from layerleap.lens.compare.matching import Measure, SpaceName
from layerleap.models.transformer import Transformer
from layerleap.models.weights import all_heads, feed_forwards, kinds, refusals, vectors

# Multiplications of all products in a space; where there are more, rows of A are drawn at random.
# 1e12 take about 15 s on two cores. The control may be coarser than what it controls.
AFFORDABLE: dict[SpaceName, float] = {"vocabulary": 5e12, "raw": 1e12}
PIECE_BYTES = 2**26  # of the correlations that exist at a time
KEPT_BYTES = 2**29  # of the rows of A that are kept ready
Blocks = Mapping[str, tuple[list[int], list[int]]]  # by kind, the blocks of both models


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
        reasons = {block: refusals(self.transformer, block) for block in self.kinds}
        return {
            f"block {block} of {self.name}": "; ".join(own) for block, own in reasons.items() if own
        }

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
        found = vectors(self.transformer, block, kind, fold=self.fold)
        if drawn is None or drawn >= len(found):
            return found
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(found), generator=generator)[:drawn]
        return found[order.sort().values.to(found.device)]


def affordable_rows(
    a: Side, b: Side, blocks: Blocks, width: int, wanted: int | None, limit: float
) -> int | None:
    """How many vectors of A per block and kind to draw; None if all of them are compared.

    Vectors of B are never left out: the best match of a vector of A may be any of them.

    Args:
        a: the model whose vectors are drawn.
        b: the other one.
        blocks: that are compared, by kind.
        width: of the rows that are multiplied.
        wanted: a number that was asked for; None for as many as are affordable.
        limit: of multiplications.
    """
    counts = {
        kind: ([a.count(kind, block) for block in in_a], [b.count(kind, block) for block in in_b])
        for kind, (in_a, in_b) in blocks.items()
    }

    def cost(rows: int) -> float:
        return sum(width * sum(min(rows, n) for n in x) * sum(y) for x, y in counts.values())

    most = max(max(x) for x, _ in counts.values())
    rows = wanted
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
    for kept in _ready(space, a, kind, in_a, draw):
        for column, block in enumerate(in_b):
            right = space.right(b.rows(kind, block))
            for row, left in kept.items():
                best[row, column], mean[row, column] = _compare(left, right)
                tick()
    return {"best": best, "mean": mean}


def _ready(
    space: Comparison, side: Side, kind: str, blocks: Sequence[int], draw: tuple[int | None, int]
) -> Iterator[dict[int, Tensor]]:
    """Blocks of A ready to be multiplied, by their place; as many at a time as may be kept."""
    kept: dict[int, Tensor] = {}
    for place, block in enumerate(blocks):
        kept[place] = space.left(side.rows(kind, block, *draw))
        if sum(4 * left.numel() for left in kept.values()) >= KEPT_BYTES:
            yield kept
            kept = {}
    if kept:
        yield kept


def _compare(left: Tensor, right: Tensor) -> tuple[float, float]:
    """The mean over left rows of the largest |product|, and the mean |product| of all pairs."""
    total, best = 0.0, torch.zeros(len(left))
    for part in right.split(max(1, PIECE_BYTES // (4 * len(left)))):
        products = (left @ part.T).abs_()
        total += float(products.sum())
        best = torch.maximum(best, products.amax(1))
    # Rounding may leave the product of equal vectors a hair above 1.
    return float(best.double().mean().clamp(max=1.0)), total / (len(left) * len(right))
