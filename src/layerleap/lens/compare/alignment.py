"""What an alignment of two models returns: a `Matching` per kind of vector, space and measure."""

from dataclasses import dataclass, field
from typing import Any

from layerleap.errors import check_choice
from layerleap.lens.compare.lists import listed
from layerleap.lens.compare.matching import Matching, Measure, SpaceName

MEASURES: tuple[Measure, ...] = ("best", "mean")


@dataclass(frozen=True)
class Alignment:
    """How the blocks of two models correspond."""

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
        return next(
            one
            for one in self.matchings
            if (one.kind, one.measure, one.space) == (kind, measure, space)
        )

    def __repr__(self) -> str:
        best = ", ".join(
            f"{kind} {one.hits}/{len(one.matches)}"
            for kind in self.kinds
            if (one := self.matching(kind))
        )
        return f"Alignment({self.a} and {self.b}, blocks at their own number by best match: {best})"

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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "a": self.a,
            "b": self.b,
            "n_tokens": self.n_tokens,
            "d_vocab": self.d_vocab,
            "fold": self.fold,
            "seed": self.seed,
            "missing": self.missing,
            "matchings": [one.to_dict() for one in self.matchings],
        }

    def to_pandas(self) -> Any:
        """A data frame with one line per match."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    "kind": one.kind,
                    "space": one.space,
                    "measure": one.measure,
                    "a": match.a,
                    "b": match.b,
                    "is_own": match.is_own,
                    "similarity": match.similarity,
                    "margin": match.margin,
                }
                for one in self.matchings
                for match in one.matches
            ]
        )

    def _repr_html_(self) -> str:
        from layerleap.show.html.compare import alignment_html

        return alignment_html(self)
