"""Layers of two models matched one to one, with match confidence.

In: a similarity of every block of A to every block of B. Out: `Matching`: the assignment with the
largest sum (Hungarian algorithm), a margin per block, and how many blocks met their own number,
beside what a random assignment would give.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, perm
from typing import Any, Literal

from torch import Tensor

from layerleap.extras import learn_library

Measure = Literal["mean", "best"]
SpaceName = Literal["vocabulary", "raw"]


@dataclass(frozen=True)
class LayerMatch:
    """A block of A and the block of B that it was matched to."""

    a: int
    b: int
    similarity: float
    # Similarity minus that of the most similar other block of B. Negative if another block is more
    # similar, and was given to someone else; None if B has no other block.
    margin: float | None

    @property
    def is_own(self) -> bool:
        """Whether both have the same number."""
        return self.a == self.b


@dataclass(frozen=True)
class Matching:
    """Blocks of A matched to blocks of B by one kind of vector, in one space, by one measure.

    The measure "mean" is the mean |correlation| over all pairs of rows; "best" is the mean over
    rows of A of the largest |correlation| with any row of B.
    """

    kind: str
    space: SpaceName
    measure: Measure
    blocks_a: tuple[int, ...]
    blocks_b: tuple[int, ...]
    similarity: tuple[tuple[float, ...], ...]  # by block of A, then of B
    matches: tuple[LayerMatch, ...]  # as many as the smaller model has blocks
    rows: int | None = None  # of A drawn per block; None if all were compared

    def __repr__(self) -> str:
        return (
            f"Matching({self.kind}, {self.space}, {self.measure}: {self.hits} of "
            f"{len(self.matches)} blocks at their own number, {self.expected_hits:.1f} by chance)"
        )

    @property
    def hits(self) -> int:
        """How many blocks were matched to the block with their own number."""
        return sum(match.is_own for match in self.matches)

    @property
    def expected_hits(self) -> float:
        """How many a random one-to-one assignment gives on average."""
        return self._common / max(len(self.blocks_a), len(self.blocks_b))

    @property
    def chance(self) -> float:
        """The share of all one-to-one assignments with at least this many hits; exact."""
        larger = max(len(self.blocks_a), len(self.blocks_b))
        return chance_of_hits(self.hits, self._common, larger)

    @property
    def smallest_margin(self) -> float | None:
        """The margin of the least certain match."""
        margins = [match.margin for match in self.matches if match.margin is not None]
        return min(margins, default=None)

    @property
    def _common(self) -> int:
        return len({*self.blocks_a} & {*self.blocks_b})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        keys = ("hits", "expected_hits", "chance", "smallest_margin")
        return asdict(self) | {key: getattr(self, key) for key in keys}


def match_layers(
    similarity: Tensor,
    blocks_a: Sequence[int],
    blocks_b: Sequence[int],
    *,
    kind: str,
    space: SpaceName,
    measure: Measure,
    rows: int | None = None,
) -> Matching:
    """The one-to-one assignment of blocks with the largest total similarity, (n_a, n_b)."""
    optimize = learn_library("scipy.optimize", why="layers are matched with it")
    places, partners = optimize.linear_sum_assignment(similarity.numpy(), maximize=True)
    matches = []
    for row, column in zip(places.tolist(), partners.tolist(), strict=True):
        others = similarity[row].tolist()
        value = others.pop(column)
        margin = value - max(others) if others else None
        matches.append(LayerMatch(blocks_a[row], blocks_b[column], value, margin))
    table = tuple(map(tuple, similarity.tolist()))
    blocks = tuple(blocks_a), tuple(blocks_b)
    return Matching(kind, space, measure, *blocks, table, tuple(matches), rows)


def chance_of_hits(hits: int, common: int, larger: int) -> float:
    """The probability of at least `hits` fixed points in a random one-to-one assignment.

    Any j given fixed points occur in (larger - j)! of larger! assignments; inclusion and exclusion
    over the sets of j out of `common` does the rest, in whole numbers.
    """
    total = perm(larger, common)  # counts by larger! / (larger - common)!, all terms divisible
    ways = 0
    for k in range(hits, common + 1):
        for j in range(k, common + 1):
            free = perm(larger - j, common - j)
            ways += (-1) ** (j - k) * comb(j, k) * comb(common, j) * free
    return ways / total
