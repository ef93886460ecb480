"""Alignment: which layers of two models with one vocabulary hold the same parameters.

In: two wrapped models. Out: `Alignment`: for every kind of vector a similarity of all pairs of
blocks, the blocks matched one to one, and the same in raw coordinates as a control.

Every vector is read as scores of all tokens (the output matrix times the vector), so that models
with other bases, or other widths, can be compared: arXiv 2209.02535, section 4.1. Correlations come
from small kernels (`kernels`), block pair by block pair; none is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused, check_choice
from layerleap.models.transformer import Transformer
from layerleap.models.weights import KINDS, unembedding, vectors
from layerleap.progress import Progress, reporting
from layerleap.read.compare.kernels import Raw, Space, Vocabulary
from layerleap.read.compare.matching import Matching, Measure, SpaceName, match_layers
from layerleap.read.compare.reasons import listed

# Multiplications of all products together; more than that, and rows of A are drawn at random.
AFFORDABLE = 1e13
PIECE_BYTES = 2**26  # of the correlations that exist at a time
KEPT_BYTES = 2**29  # of the rows of A that are kept ready
MEASURES: tuple[Measure, ...] = ("best", "mean")


@dataclass(frozen=True)
class Alignment:
    """How the blocks of two models correspond."""

    a: str
    b: str
    n_tokens: int  # over which correlations are taken
    d_vocab: int
    fold: bool
    rows: int | None  # of A drawn per block and kind; None if all were compared
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
        tokens = f"all {self.n_tokens:,}" if self.n_tokens == self.d_vocab else f"{self.n_tokens:,}"
        fold = "norms folded in" if self.fold else "without norms"
        notes = [f"correlations over {tokens} tokens, by the models' output matrices, {fold}"]
        if self.rows is not None:
            notes.append(
                f"at most {self.rows} rows of {self.a} per block, drawn with seed {self.seed}; "
                f"all rows of {self.b}"
            )
        return [*notes, *listed(self.missing)]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "a": self.a, "b": self.b, "n_tokens": self.n_tokens, "d_vocab": self.d_vocab,
            "fold": self.fold, "rows": self.rows, "seed": self.seed, "missing": self.missing,
            "matchings": [one.to_dict() for one in self.matchings],
        }  # fmt: skip

    def to_pandas(self) -> Any:
        """A data frame with one line per match."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    "kind": one.kind, "space": one.space, "measure": one.measure,
                    "a": match.a, "b": match.b, "is_own": match.is_own,
                    "similarity": match.similarity, "margin": match.margin,
                }
                for one in self.matchings
                for match in one.matches
            ]
        )  # fmt: skip

    def _repr_html_(self) -> str:
        from layerleap.show.html.compare import alignment_html

        return alignment_html(self)


@checked
def align(
    a: Transformer,
    b: Transformer,
    *,
    kinds: Sequence[str] | None = None,
    tokens: Sequence[int] | Tensor | None = None,
    rows: int | None = None,
    seed: int = 0,
    fold: bool = False,
    control: bool = True,
    progress: Progress | bool = True,
) -> Alignment:
    """Match the blocks of two models with one vocabulary by what their vectors say about tokens.

        ll.align(model, other).matching("ffn.value").matches

    Args:
        kinds: of vectors, such as "ffn.value" or "attn.q"; all that both models have when None.
        tokens: ids over which correlations are taken; all when None. Small models have rows for
            tokens that they never met, and these are noise.
        rows: vectors of `a` per block and kind, drawn at random; they are compared with all
            vectors of `b`. None takes all, unless that would take many minutes; the result says so.
        seed: of the draw.
        fold: multiply by the norm in front of readers, and by the final norm for writers.
        control: match in raw coordinates as well; needs equal widths.
        progress: True is a bar on a terminal.
    """
    if rows is not None and rows < 1:
        raise BadSettings(f"rows is {rows}; expected 1 or more")
    chosen = _tokens(a, tokens)
    _check_vocabularies(a, b)
    for kind in kinds or ():
        check_choice(kind, KINDS, "kind")
    missing: dict[str, str] = {}
    sides = [_Side(one, fold, missing) for one in (a, b)]
    blocks = {
        kind: both
        for kind in dict.fromkeys(kinds or KINDS)
        if all(both := [side.blocks(kind, is_asked=kinds is not None) for side in sides])
    }
    if not blocks:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise ModelRefused(f"no kind of vector is known in both models ({reasons or 'none'})")
    spaces: dict[SpaceName, Space] = {
        "vocabulary": Vocabulary.of(unembedding(a), unembedding(b), chosen)
    }
    if control and a.d_model == b.d_model:
        spaces["raw"] = Raw(a.d_model)
    elif control:
        missing["raw"] = (
            f"raw coordinates cannot be compared: the models are {a.d_model} and {b.d_model} wide"
        )
    drawn = rows if rows is not None else _affordable_rows(sides, blocks, spaces)
    sides[0].draw(drawn, seed)
    matchings = []
    with reporting(progress) as report:
        total = sum(len(x) * len(y) for x, y in blocks.values()) * len(spaces)
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            report("comparing blocks", done, total, "pairs")

        for kind, (in_a, in_b) in blocks.items():
            for name, space in spaces.items():
                found = _similarities(
                    space, *(side.rows_of(kind) for side in sides), in_a, in_b, tick
                )
                matchings += [
                    match_layers(found[m], in_a, in_b, kind=kind, space=name, measure=m)
                    for m in MEASURES
                ]
    n_tokens = a.d_vocab if chosen is None else len(chosen)
    names = a.identity.name, b.identity.name
    kept = sides[0].drawn
    return Alignment(*names, n_tokens, a.d_vocab, fold, kept, seed, tuple(matchings), missing)


def _check_vocabularies(a: Transformer, b: Transformer) -> None:
    names = f"{a.identity.name} and {b.identity.name}"
    for one in (a, b):
        if one.kind.endswith("-class"):
            raise BadSettings(
                f"{one.identity.name} predicts classes, not tokens; models are aligned by the "
                "tokens of one vocabulary: load it with its language-model head"
            )
    if a.d_vocab != b.d_vocab:
        raise BadSettings(
            f"{names} have different vocabularies: {a.d_vocab:,} and {b.d_vocab:,} tokens; models "
            "can be aligned only over one vocabulary"
        )
    if a.tokenizer is None or b.tokenizer is None:
        return
    own, other = a.tokenizer.get_vocab(), b.tokenizer.get_vocab()
    if own != other:
        differ = [word for word in own.keys() | other.keys() if own.get(word) != other.get(word)]
        raise BadSettings(
            f"{names} have different vocabularies: {len(differ):,} tokens, such as "
            f"{min(differ)!r}, have different ids; models can be aligned only over one vocabulary"
        )


def _tokens(transformer: Transformer, tokens: Sequence[int] | Tensor | None) -> Tensor | None:
    """The chosen ids, in order and each once."""
    if tokens is None:
        return None
    ids = torch.as_tensor(tokens, dtype=torch.long).flatten().unique()
    if len(ids) < 2:
        raise BadSettings(f"tokens has {len(ids)} different ids; a correlation needs at least 2")
    if ids[0] < 0 or ids[-1] >= transformer.d_vocab:
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        raise BadSettings(f"token {wrong} does not exist; expected 0 to {transformer.d_vocab - 1}")
    return ids


class _Side:
    """The vectors of one model, block by block, of which some may be drawn."""

    def __init__(self, transformer: Transformer, fold: bool, missing: dict[str, str]) -> None:
        self.transformer, self.fold, self.missing = transformer, fold, missing
        self.counts: dict[tuple[str, int], int] = {}
        self.drawn: int | None = None
        self.seed = 0

    def blocks(self, kind: str, *, is_asked: bool) -> list[int]:
        """The blocks with vectors of that kind; why others have none is noted.

        A kind that no block has is worth a note only if it was asked for: no FFN has both
        "ffn.key" and "ffn.gate".
        """
        reasons = {}
        for block in range(1, self.transformer.n_layers + 1):
            try:
                found = vectors(self.transformer, block, kind, fold=self.fold)
            except ModelRefused as error:
                reasons[block] = str(error)
            else:
                self.counts[kind, block] = len(found)
        known = [block for name, block in self.counts if name == kind]
        if known or is_asked:
            for block, reason in reasons.items():
                self.missing[f"{kind} of block {block} of {self.transformer.identity.name}"] = (
                    reason
                )
        return known

    def draw(self, rows: int | None, seed: int) -> None:
        """Take at most so many rows of each block from now on."""
        is_fewer = rows is not None and rows < max(self.counts.values())
        self.drawn, self.seed = (rows if is_fewer else None), seed

    def rows_of(self, kind: str) -> Callable[[int], Tensor]:
        """The rows of a block."""

        def rows(block: int) -> Tensor:
            found = vectors(self.transformer, block, kind, fold=self.fold)
            if self.drawn is None or self.drawn >= len(found):
                return found
            generator = torch.Generator().manual_seed(self.seed)
            order = torch.randperm(len(found), generator=generator)[: self.drawn]
            return found[order.sort().values.to(found.device)]

        return rows


def _affordable_rows(
    sides: Sequence[_Side], blocks: dict[str, list[list[int]]], spaces: dict[SpaceName, Space]
) -> int | None:
    """The largest number of rows of A whose products stay affordable; None if all do."""
    width = sum(space.width for space in spaces.values())

    def cost(rows: int) -> float:
        return sum(
            width
            * sum(min(rows, sides[0].counts[kind, block]) for block in in_a)
            * sum(sides[1].counts[kind, block] for block in in_b)
            for kind, (in_a, in_b) in blocks.items()
        )

    most = max(sides[0].counts.values())
    if cost(most) <= AFFORDABLE:
        return None
    rows = 64
    while cost(2 * rows) <= AFFORDABLE:
        rows *= 2
    return rows


@torch.no_grad()
def _similarities(
    space: Space,
    rows_a: Callable[[int], Tensor],
    rows_b: Callable[[int], Tensor],
    in_a: Sequence[int],
    in_b: Sequence[int],
    tick: Callable[[], None],
) -> dict[Measure, Tensor]:
    """Mean and best |correlation| of all pairs of blocks: (n_a, n_b) each, float64."""
    shape = len(in_a), len(in_b)
    found: dict[Measure, Tensor] = {
        m: torch.zeros(shape, dtype=torch.float64) for m in MEASURES
    }  # fmt: skip
    for kept in _ready(space, rows_a, in_a):
        for column, block in enumerate(in_b):
            right = space.right(rows_b(block))
            for row, left in kept.items():
                mean, best = _compare(left, right)
                found["mean"][row, column], found["best"][row, column] = mean, best
                tick()
    return found


def _ready(
    space: Space, rows_a: Callable[[int], Tensor], in_a: Sequence[int]
) -> Iterator[dict[int, Tensor]]:
    """Blocks of A ready to be multiplied, by their place; as many at a time as may be kept."""
    kept: dict[int, Tensor] = {}
    for place, block in enumerate(in_a):
        kept[place] = space.left(rows_a(block))
        if sum(4 * left.numel() for left in kept.values()) >= KEPT_BYTES:
            yield kept
            kept = {}
    if kept:
        yield kept


def _compare(left: Tensor, right: Tensor) -> tuple[float, float]:
    """The mean |product| of all pairs of rows, and the mean over left rows of the largest."""
    total, best = 0.0, torch.zeros(len(left))
    for part in right.split(max(1, PIECE_BYTES // (4 * len(left)))):
        products = (left @ part.T).abs_()
        total += float(products.sum())
        best = torch.maximum(best, products.amax(1))
    # Rounding may leave a product of equal vectors a hair above 1.
    return total / (len(left) * len(right)), float(best.double().mean().clamp(max=1.0))
