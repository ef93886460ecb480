"""What an alignment of two models returns: a `Matching` per kind of vector, space and measure.

In: similarities of every block of A to every block of B. Out: the assignment with the largest sum
(Hungarian algorithm), a margin per block, and how many blocks met their own number, beside what a
random assignment would give.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import comb, perm
from typing import Any, ClassVar, Literal

from torch import Tensor

from layerleap.errors import check_choice
from layerleap.extras import learn_library
from layerleap.lens.compare.lists import listed
from layerleap.results.base import Result
from layerleap.results.cells import Cell, Grid, grid_of
from layerleap.results.colours import saturation_colour
from layerleap.results.columns import Column, Row, Table
from layerleap.results.head import PageHead

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


LEAD = (
    "Vectors of both models are read as scores of all tokens, and compared by the correlation of "
    "these scores. A row of a heat map is a block of the first model, a column a block of the "
    "second; darker is more similar, on a scale of its own for each map. Framed: the blocks that "
    "were matched, one to one, so that their similarities have the largest sum (Hungarian "
    "algorithm). The margin of a match is its similarity minus that of the next best block: near 0 "
    "it is a match by a hair, below 0 another block was more similar. The control compares raw "
    "coordinates, which mean the same only if one model was made from the other."
)
MEASURES: tuple[Measure, ...] = ("best", "mean")


@dataclass(frozen=True, repr=False)
class Alignment(Result):
    """How the blocks of two models correspond."""

    KIND: ClassVar[str] = "compare"
    TEMPLATE: ClassVar[str] = "alignment"
    FACTS: ClassVar = ("a", "b", "n_tokens", "d_vocab", "fold", "seed", "missing")
    LEGEND: ClassVar[str] = (
        "best: mean over rows of the largest |correlation|; mean: over all pairs of rows; p: share "
        "of random assignments with as many hits; margin: similarity of a match minus that of the "
        "next best block"
    )
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "matchings",
            "Blocks matched to their own number",
            lambda alignment: [one.to_dict() for one in alignment.matchings],
            (
                Column("kind"),
                Column("space", "compared"),
                Column("measure", "by"),
                Column("hits", "own number", note="of"),
                Column("expected_hits", "by chance", "{:.1f}"),
                Column("chance", "p", "{:.2g}"),
                Column("smallest_margin", "least margin", "{:+.4f}"),
            ),
            lines=lambda alignment: alignment._lines(),
        ),
    )

    a: str
    b: str
    n_tokens: int  # over which correlations are taken
    d_vocab: int
    fold: bool
    seed: int
    matchings: tuple[Matching, ...]
    missing: dict[str, str] = field(default_factory=dict)  # what was not compared, and why

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of vectors that were compared."""
        return tuple(dict.fromkeys(one.kind for one in self.matchings))

    @property
    def spaces(self) -> tuple[SpaceName, ...]:
        """The spaces that were compared: "raw" is missing where the control was not possible."""
        return tuple(dict.fromkeys(one.space for one in self.matchings))

    def matching(
        self, kind: str, measure: Measure = "best", space: SpaceName = "vocabulary"
    ) -> Matching:
        """The blocks matched by one kind of vector."""
        check_choice(kind, self.kinds, "kind")
        check_choice(measure, MEASURES, "measure")
        check_choice(space, self.spaces, "space")
        chosen = (kind, measure, space)
        return next(m for m in self.matchings if (m.kind, m.measure, m.space) == chosen)

    def short(self) -> str:
        """What it is, in one line."""
        best = map(self.matching, self.kinds)
        hits = ", ".join(f"{one.kind} {one.hits}/{len(one.matches)}" for one in best)
        return f"Alignment({self.a} and {self.b}, blocks at their own number by best match: {hits})"

    @property
    def notes(self) -> list[str]:
        """What a reader must know: tokens, rows that were drawn, and what is missing."""
        is_all = self.n_tokens == self.d_vocab
        tokens = f"all {self.d_vocab:,}" if is_all else f"{self.n_tokens:,} of {self.d_vocab:,}"
        fold = "norms folded in" if self.fold else "without norms"
        notes = [f"correlations over {tokens} tokens, by the models' output matrices, {fold}"]
        rows = {one.space: one.rows for one in self.matchings if one.rows is not None}
        for space, drawn in rows.items():
            notes.append(
                f"{space}: at most {drawn} rows of {self.a} per block and kind, drawn with seed "
                f"{self.seed}, and all rows of {self.b}"
            )
        return [*notes, *listed(self.missing)]

    def headline(self) -> str:
        """Both models."""
        return f"{self.a} and {self.b}"

    def _lines(self) -> list[Row]:
        """One line per match."""
        keys = ("a", "b", "is_own", "similarity", "margin")
        return [
            {"kind": one.kind, "space": one.space, "measure": one.measure}
            | {key: getattr(match, key) for key in keys}
            for one in self.matchings
            for match in one.matches
        ]

    def grids(self, width: int | None = None) -> list[Grid]:
        """A summary, and every match: on a page to be opened, in a terminal of a single kind."""
        if width is None:
            shown = list(self.matchings)
        else:
            shown = [one for one in self.matchings if one.space == "vocabulary"]
            shown = shown if len(self.kinds) == 1 else []
        rows = [{**one.to_dict(), "of": f"of {len(one.matches)}"} for one in self.matchings]
        summary = grid_of(replace(self.TABLES[0], rows=lambda _: rows), self)
        return [summary, *(_matches(one, width is None) for one in shown)]

    def picture(self) -> Row:
        """A heat map per kind, space and measure."""
        maps: dict[str, list[Row]] = {kind: [] for kind in self.kinds}
        for one in self.matchings:
            maps[one.kind].append(heat_map(one))
        return {"maps": maps}

    def head(self) -> PageHead:
        """What a page says around it."""
        first = self.matchings[0]
        return PageHead(
            kicker="alignment",
            title=("Which layers of", f"{self.a} and {self.b}", "correspond"),
            facts=(
                f"{len(first.blocks_a)} and {len(first.blocks_b)} blocks",
                f"{self.n_tokens:,} tokens",
                f"{len(self.kinds)} kinds of vectors",
            ),
            heading="Blocks matched one to one",
            lead=LEAD,
        )


def _matches(one: Matching, folded: bool) -> Grid:
    """Every match; bold where a block met its own number."""
    rows = [
        [
            Cell(str(match.a), sort=match.a),
            Cell(str(match.b), sort=match.b, strong=match.is_own),
            Cell(f"{match.similarity:.4f}", sort=match.similarity),
            Cell("-" if match.margin is None else f"{match.margin:+.4f}", sort=match.margin or 0.0),
        ]
        for match in one.matches
    ]
    title = f"{one.kind}, {one.space}, {one.measure}: every match"
    heads = ("block", "matched to", "similarity", "margin")
    return Grid(heads, rows, folded=title) if folded else Grid(heads, rows, title)


SPACES = {"vocabulary": "in the vocabulary", "raw": "raw coordinates (control)"}
MEASURED = {"best": "best match", "mean": "mean |correlation|"}
LEVELS = 16  # shades of a heat map: cells of one shade are one path, which keeps pages small
LONGEST, MARGIN = 270, 26  # pixels: the longer side of a heat map, and the room for numbers


def heat_map(one: Matching) -> Row:
    """Paths of its cells by colour, a frame around each match, and the numbers of blocks."""
    values = [value for row in one.similarity for value in row]
    low, high = min(values), max(values)
    # The side of a cell, so that maps of small and of deep models are about as large.
    cell = max(4, min(24, LONGEST // max(len(one.blocks_a), len(one.blocks_b))))
    shades: dict[int, list[str]] = defaultdict(list)
    for y, row in enumerate(one.similarity):
        for x, value in enumerate(row):
            level = int((LEVELS - 1) * (value - low) / (high - low)) if high > low else 0
            shades[level].append(f"M{x * cell} {y * cell}h{cell}v{cell}h-{cell}z")
    rows, columns = ({b: i for i, b in enumerate(bs)} for bs in (one.blocks_a, one.blocks_b))
    side = cell - 2
    framed = "".join(
        f"M{columns[match.b] * cell + 1} {rows[match.a] * cell + 1}h{side}v{side}h-{side}z"
        for match in one.matches
    )
    measured, space = MEASURED[one.measure], SPACES[one.space]
    hits = f"{one.hits} of {len(one.matches)} blocks matched to their own number"
    return {
        "lines": (measured, space, f"{low:.3f} (light) to {high:.3f} (dark)"),
        "label": f"{one.kind}, {measured}, {space}: {hits}",
        "cells": [
            (saturation_colour(LEVELS - 1 - level, LEVELS), "".join(paths))
            for level, paths in sorted(shades.items())
        ],
        "framed": framed,
        "margin": MARGIN,
        "width": cell * len(columns),
        "height": cell * len(rows),
        "rows": _ticks(one.blocks_a, cell),
        "columns": _ticks(one.blocks_b, cell),
    }


def _ticks(blocks: tuple[int, ...], cell: int) -> list[tuple[int, int]]:
    """Places and numbers: of every block where there is room, or the first and every fifth."""
    step = 1 if cell >= 14 else 5
    return [
        (place * cell + cell // 2, block)
        for place, block in enumerate(blocks)
        if place == 0 or block % step == 0
    ]
