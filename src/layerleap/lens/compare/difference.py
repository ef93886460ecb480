"""What a comparison of a base model with a tuned one returns: `Difference` and its rows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from layerleap.errors import check_choice
from layerleap.lens.compare.lists import listed, ranges
from layerleap.lens.vocabulary.neurons import Scored
from layerleap.lens.vocabulary.settings import Inverse

Words = tuple[Scored, ...]
By = Literal["block", "head", "neuron"]


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


@dataclass(frozen=True)
class Difference:
    """What a tuned model changed in its base."""

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

    def __repr__(self) -> str:
        sizes = {one.block: one.relative for one in self.blocks if one.relative}
        most = max(sizes, key=lambda block: sizes[block], default=None)
        end = "" if most is None else f", most block {most} ({_percent(sizes[most])})"
        moved = f"{len(self.blocks) - len(self.unmoved)} of {len(self.blocks)} blocks moved"
        return f"Difference({self.base} -> {self.tuned}: {moved}{end})"

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "base": self.base,
            "tuned": self.tuned,
            "how": self.how,
            "inverse": self.inverse,
            "unmoved": list(self.unmoved),
            "blocks": [asdict(one) for one in self.blocks],
            "heads": [{"name": one.name, **asdict(one)} for one in self.heads],
            "neurons": [{"name": one.name, **asdict(one)} for one in self.neurons],
            "outside": [asdict(one) for one in self.outside],
            "missing": self.missing,
        }

    def to_pandas(self, by: By = "block") -> Any:
        """A data frame with one line per block, head or neuron."""
        import pandas

        check_choice(by, By, "by")
        if by == "block":
            return pandas.DataFrame(
                [
                    {
                        "block": one.block,
                        "relative": one.relative,
                        "is_identical": one.is_identical,
                        **one.kinds,
                    }
                    for one in self.blocks
                ]
            )
        rows: Sequence[HeadChange | NeuronChange] = self.heads if by == "head" else self.neurons
        return pandas.DataFrame([{"name": one.name, **_flat(one)} for one in rows])

    def _repr_html_(self) -> str:
        from layerleap.show.html.compare import difference_html

        return difference_html(self)


def _percent(share: float) -> str:
    return f"{100 * share:,.0f} %" if share >= 1 else f"{100 * share:.2g} %"


def _flat(change: HeadChange | NeuronChange) -> dict[str, Any]:
    words = {"promotes": change.promotes, "suppresses": change.suppresses}
    return asdict(change) | {
        key: " ".join(scored.token.label for scored in found) for key, found in words.items()
    }
