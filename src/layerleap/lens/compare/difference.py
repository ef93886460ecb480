"""What a comparison of a base model with a tuned one returns: `Difference` and its rows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

from layerleap.lens.compare.lists import listed, ranges
from layerleap.lens.vocabulary.ends import Scored
from layerleap.lens.vocabulary.index_settings import Inverse
from layerleap.results.base import Result
from layerleap.results.cells import Grid, grid_of
from layerleap.results.columns import Column, Row, Table
from layerleap.results.head import PageHead

Words = tuple[Scored, ...]
LEAD = (
    "How far the tuned model's weights lie from those of its base, relative to their size. The "
    "tokens are those that a displacement (tuned minus base, at unit length) promotes and "
    "suppresses most, by the base's output matrix. A head is read along the direction that holds "
    "most of its displacement; such a direction has no sign, so its two lists could be swapped."
)


@dataclass(frozen=True)
class BlockChange:
    """How far one block moved."""

    block: int
    relative: float | None  # ||tuned - base|| / ||base|| over all its parameters; None if unknown
    is_identical: bool  # bit by bit, norms and biases included
    kinds: dict[str, float] = field(default_factory=dict)  # the same for each kind of matrix
    missing: dict[str, str] = field(default_factory=dict)  # what could not be compared, and why


@dataclass(frozen=True)
class HeadChange:
    """How far one head's part of a matrix moved."""

    block: int
    head: int  # of the queries and outputs; of the keys and values where several heads share them
    kind: str
    is_shared: bool  # by several query heads
    relative: float  # ||tuned - base|| / ||base||
    share: float  # of its squared displacement along the direction that was read
    promotes: Words = ()
    suppresses: Words = ()

    @property
    def name(self) -> str:
        """Such as L12.H3, or L12.KV1 where several heads share keys and values."""
        return f"L{self.block}.{'KV' if self.is_shared else 'H'}{self.head}"


@dataclass(frozen=True)
class NeuronChange:
    """How far one vector of a neuron moved."""

    block: int
    neuron: int
    kind: str
    displacement: float  # ||tuned - base||
    relative: float | None  # displacement / ||base||; None if the base is 0
    cosine: float | None  # of the displacement to the base's vector: -1 shrinks it, 1 stretches it
    promotes: Words = ()
    suppresses: Words = ()

    @property
    def name(self) -> str:
        """Its name in edits, such as L12.N34."""
        return f"L{self.block}.N{self.neuron}"


@dataclass(frozen=True)
class OutsideChange:
    """How far a tensor outside the blocks moved: embeddings, final norm, head."""

    name: str
    relative: float | None  # None if it could not be compared
    is_identical: bool
    remark: str = ""


def _named(changes: Sequence[HeadChange | NeuronChange]) -> list[Row]:
    """Plain rows with the name of each."""
    return [{"name": one.name, **asdict(one)} for one in changes]


def _block_line(change: BlockChange) -> Row:
    keys = ("block", "relative", "is_identical")
    return {key: getattr(change, key) for key in keys} | change.kinds


MOVED = Column("relative", "moved", "{:.3g} %", 100)
ENDS = (Column("promotes"), Column("suppresses"))


@dataclass(frozen=True, repr=False)
class Difference(Result):
    """What a tuned model changed in its base."""

    KIND: ClassVar[str] = "compare"
    FACTS: ClassVar[tuple[str, ...]] = ("base", "tuned", "how", "inverse", "missing", "unmoved")
    LEGEND: ClassVar[str] = (
        "moved: ||tuned - base|| / ||base||; in one direction: share of a head's squared "
        "displacement along the direction that is read; cosine: -1 shrinks a vector, 1 stretches it"
    )
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "blocks",
            "Blocks that moved: ||tuned - base|| / ||base|| of all parameters, and by kind",
            lambda difference: map(asdict, difference.blocks),
            lines=lambda difference: map(_block_line, difference.blocks),
        ),
        Table(
            "outside",
            "Outside the blocks",
            lambda difference: map(asdict, difference.outside),
            (
                Column("name", "tensor"),
                replace(MOVED, words={0.0: "did not move"}),
                Column("remark", ""),
            ),
        ),
        Table(
            "heads",
            "Heads that moved most, by kind",
            lambda difference: _named(difference.heads),
            (
                Column("name", "head"),
                Column("kind", "matrix"),
                MOVED,
                Column("share", "in one direction", "{:.0f} %", 100),
                *ENDS,
            ),
        ),
        Table(
            "neurons",
            "Neurons that moved most, by kind",
            lambda difference: _named(difference.neurons),
            (
                Column("name", "neuron"),
                Column("kind", "vector"),
                Column("displacement", "moved by", "{:.3g}"),
                replace(MOVED, title="relative"),
                Column("cosine", "cosine to base", "{:+.2f}"),
                *ENDS,
            ),
        ),
    )

    base: str
    tuned: str
    how: str  # the weights were read
    inverse: Inverse
    blocks: tuple[BlockChange, ...]
    heads: tuple[HeadChange, ...]  # by kind, those that moved most first
    neurons: tuple[NeuronChange, ...]
    outside: tuple[OutsideChange, ...]
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def unmoved(self) -> tuple[int, ...]:
        """The blocks that are bit-identical in both models."""
        return tuple(one.block for one in self.blocks if one.is_identical)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of matrices that were compared in any block."""
        return tuple(dict.fromkeys(kind for one in self.blocks for kind in one.kinds))

    def short(self) -> str:
        """What it is, in one line."""
        sizes = {one.block: one.relative for one in self.blocks if one.relative}
        most = max(sizes, key=lambda block: sizes[block], default=None)
        end = "" if most is None else f", most block {most} ({_percent(sizes[most])})"
        return f"Difference({self.headline()}{end})"

    @property
    def notes(self) -> list[str]:
        """How it was read, which blocks did not move, and what is missing."""
        notes = [self.how]
        if self.inverse == "pseudo":
            notes.append("tokens by the pseudo-inverse of the output matrix")
        if len(self.unmoved) == len(self.blocks):
            notes.append("no block moved: all are bit-identical")
        elif self.unmoved:
            word = "block" if len(self.unmoved) == 1 else "blocks"
            notes.append(f"did not move (bit-identical): {word} {ranges(self.unmoved)}")
        missing = dict(self.missing)
        for one in self.blocks:
            missing |= {f"{name} of block {one.block}": why for name, why in one.missing.items()}
        return [*notes, *listed(missing)]

    def headline(self) -> str:
        """Both models, and how many blocks moved."""
        return f"{self.base} -> {self.tuned}: {self._n_moved()}"

    def _n_moved(self) -> str:
        return f"{len(self.blocks) - len(self.unmoved)} of {len(self.blocks)} blocks moved"

    def grids(self, width: int | None = None) -> list[Grid]:
        """Blocks, the last first, with a column per kind of matrix; then the other tables."""
        rows = [
            {**asdict(one), **one.kinds} for one in reversed(self.blocks) if not one.is_identical
        ]
        kinds = (replace(MOVED, key=kind, title=kind) for kind in self.kinds)
        columns = (Column("block"), replace(MOVED, title="all", bar=True), *kinds)
        blocks = replace(self.TABLES[0], rows=lambda _: rows, columns=columns)
        return [grid_of(table, self) for table in (blocks, *self.TABLES[1:])]

    def head(self) -> PageHead:
        """What a page says around it."""
        return PageHead(
            kicker="fine-tuning in words",
            title=("What changed from", f"{self.base} to {self.tuned}", ""),
            facts=(self._n_moved(),),
            heading="What moved, and towards which tokens",
            lead=LEAD,
        )


def _percent(share: float) -> str:
    return f"{100 * share:,.0f} %" if share >= 1 else f"{100 * share:.2g} %"
