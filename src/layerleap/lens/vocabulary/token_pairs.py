"""The strongest token pairs of an attention head, without ever forming the matrix of all pairs.

In: a `Space` and a head. Out: `Pairs`: token pairs with their scores, strongest first.

    W_QK    E' W_Q R W_K^T E'^T    how much a query token looks for a key token
    W_VO    E' W_V W_O E           what attending to a source token writes

R is the rotation of rotary positions between query and key, at one offset: the number of positions
that the key lies behind the query. At offset 0, R is the identity. Either matrix has d_vocab x
d_vocab entries, 9.7 GB for 49,152 tokens, but only rank d_head. So it is the product of two thin
factors, made block by block, and an entry below the weakest pair kept so far is dropped at once.

Scores are those of centred embeddings by default. Most embeddings share one huge direction, and
without centring the list shows this direction rather than what sets tokens apart.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.vocabulary.addresses import Address
from layerleap.lens.vocabulary.index_settings import Form, Largest
from layerleap.lens.vocabulary.space import Space
from layerleap.lens.vocabulary.tokens import TokenLabel, token_label
from layerleap.models.facts import check_number
from layerleap.models.weights import heads as heads_of, known_tokens
from layerleap.progress import Progress, silent
from layerleap.results import cells
from layerleap.results.base import Result
from layerleap.results.colours import signed_colour
from layerleap.results.columns import Column, Row, Table

ROLES = {"vo": ("source token", "written token"), "qk": ("query token", "key token")}
BLOCK_ROWS, BLOCK_COLUMNS = 512, 1024  # 2 MB of float32, which stays in the cache
GRID = 12  # rows and columns of the grid
NORMED = "queries or keys pass a norm, so that scores lack a positive factor per token"


@dataclass(frozen=True)
class TokenPair:
    """Two tokens and the entry of the matrix that belongs to them."""

    first: TokenLabel
    second: TokenLabel
    score: float


@dataclass(frozen=True)
class Grid:
    """All entries between the tokens of the strongest pairs, a few rows and columns of them."""

    rows: tuple[TokenLabel, ...]
    columns: tuple[TokenLabel, ...]
    scores: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, repr=False)
class Pairs(Result):
    """The strongest token pairs of one head in one of its two forms."""

    KIND: ClassVar[str] = "weights"
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "pairs",
            "",
            lambda result: map(asdict, result.pairs),
            tuple(map(Column, ("first", "second", "score", "first_id", "second_id"))),
            lines=lambda result: map(_line, result.pairs),
        ),
    )

    head: str  # such as L12.H3
    form: Form
    offset: int | None  # positions the key lies behind the query; None where it does not matter
    pairs: tuple[TokenPair, ...]  # strongest first; equal scores are ordered by id
    grid: Grid
    n_tokens: int  # tokens considered on either side
    restricted: bool  # to some of the vocabulary
    centred: bool
    identical: bool  # pairs of a token with itself were considered
    largest: Largest
    about: dict[str, Any]  # norms, inverse, and the matrices that tokens were read through
    words: str  # the same in one line
    note: str = ""  # what else to know about these scores

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[TokenPair]:
        return iter(self.pairs)

    def short(self) -> str:
        """What it is, in one line."""
        return f"Pairs({self.title}, {len(self)} pairs of {self.n_tokens:,} tokens)"

    @property
    def roles(self) -> tuple[str, str]:
        """What the two tokens of a pair are."""
        return ROLES[self.form]

    @property
    def title(self) -> str:
        """The head, the form and, with rotary positions, the offset."""
        where = "" if self.offset is None else f" at offset {self.offset}"
        return f"{self.head} W_{self.form.upper()}{where}"

    def headline(self) -> str:
        """The head, and what its pairs are."""
        return f"{self.title}: {self.roles[0]} \u2192 {self.roles[1]}"

    def legend(self) -> str:
        """How the scores were made, in one line."""
        kind = {"value": "largest", "negative": "most negative", "magnitude": "largest absolute"}
        some = f"{self.n_tokens:,} chosen" if self.restricted else f"all {self.n_tokens:,}"
        same = "" if self.identical else ", pairs of a token with itself left out"
        centred = "centred" if self.centred else "raw"
        scores = f"{kind[self.largest]} scores between {some} tokens{same}"
        note = f"; {self.note}" if self.note else ""
        return f"{scores}; {centred} embeddings, {self.words}{note}"

    def facts(self) -> Row:
        """The head, and how the scores were made."""
        keys = ("head", "form", "offset", "n_tokens", "restricted", "centred", "identical")
        values = {key: getattr(self, key) for key in (*keys, "largest")}
        return {**values, "roles": list(self.roles), **self.about, "note": self.note}

    def grids(self, width: int | None = None) -> list[cells.Grid]:
        """The pairs, to be read down two columns; on a page below the scores of their tokens."""
        height = -(-len(self) // 2)
        halves = (self.pairs[:height], self.pairs[height:])
        rows = [[cell for pair in row for cell in _pair(pair)] for row in zip_longest(*halves)]
        listed = cells.Grid(("score", "pair") * 2, rows)
        return [listed] if width is not None else [self._scores(), listed]

    def _scores(self) -> cells.Grid:
        """The scores between the strongest tokens, on the colour of their size and sign."""
        strong = {(pair.first.id, pair.second.id) for pair in self}
        most = max((abs(score) for row in self.grid.scores for score in row), default=0.0)
        rows = [
            [
                cells.Cell(first.label, strong=True, title=f"id {first.id}"),
                *(
                    cells.Cell(
                        f"{score:.3g}",
                        sort=score,
                        framed=(first.id, second.id) in strong,
                        colour=signed_colour(score / most if most else 0.0),
                    )
                    for second, score in zip(self.grid.columns, scores, strict=True)
                ),
            ]
            for first, scores in zip(self.grid.rows, self.grid.scores, strict=True)
        ]
        caption = (
            f"Row: {self.roles[0]}; column: {self.roles[1]}; framed: among the {len(self)} "
            "strongest pairs. Blue is positive, orange negative."
        )
        return cells.Grid(["", *(token.label for token in self.grid.columns)], rows, caption)


def _pair(pair: TokenPair | None) -> tuple[cells.Cell, cells.Cell]:
    if pair is None:
        return cells.Cell(""), cells.Cell("")
    text = f"{pair.first.label} \u2192 {pair.second.label}"
    ids = f"{pair.first.id}, {pair.second.id}"
    return cells.Cell(f"{pair.score:.3g}", sort=pair.score), cells.Cell(text, title=ids)


def _line(pair: TokenPair) -> Row:
    """What a data frame holds of one pair."""
    labels = {"first": pair.first.label, "second": pair.second.label, "score": pair.score}
    return {**labels, "first_id": pair.first.id, "second_id": pair.second.id}


def head_pairs(
    space: Space,
    address: Address,
    form: Form,
    *,
    top: int,
    tokens: Sequence[int] | None,
    offset: int,
    identical: bool,
    centred: bool,
    largest: Largest,
    progress: Progress = silent,
) -> Pairs:
    """The strongest pairs of a head; see `Weights.pairs`."""
    if top < 1:
        raise BadSettings(f"top is {top}; expected 1 or more")
    chosen = chosen_tokens(space, tokens)
    rows, columns, shown = factors(space, address, form, offset, chosen, centred)
    best = strongest(rows, columns, top, largest=largest, identical=identical, progress=progress)
    ids = range(len(rows)) if chosen is None else chosen.tolist()

    def label(place: int) -> TokenLabel:
        return token_label(space.transformer, ids[place])

    pairs = tuple(
        TokenPair(label(row), label(column), value)
        for row, column, value in zip(*(part.tolist() for part in best), strict=True)
    )
    is_normed = form == "qk" and heads_of(space.transformer, address.block).is_normed
    return Pairs(
        str(address),
        form,
        shown,
        pairs,
        _grid(label, best, rows, columns),
        n_tokens=len(rows),
        restricted=chosen is not None,
        centred=centred,
        identical=identical,
        largest=largest,
        about=space.about(),
        words=space.words(),
        note=NORMED if is_normed else "",
    )


def chosen_tokens(space: Space, tokens: Sequence[int] | None) -> Tensor | None:
    """The ids without repetition, in order; every one must be in both matrices.

    By default all tokens that have an embedding: None if that is the whole vocabulary.
    """
    if tokens is None:
        known = known_tokens(space.source, space.target)
        return None if len(known) == min(len(space.source), len(space.target)) else known
    if not tokens:
        raise BadSettings("tokens is empty; expected at least one token id, or None for all")
    chosen = torch.tensor(sorted(set(tokens)))
    last = min(len(space.source), len(space.target)) - 1
    if chosen[0] < 0 or chosen[-1] > last:
        wrong = int(chosen[0] if chosen[0] < 0 else chosen[-1])
        raise BadSettings(f"token {wrong} does not exist; expected ids from 0 to {last}")
    return chosen


def factors(
    space: Space, address: Address, form: Form, offset: int, tokens: Tensor | None, centred: bool
) -> tuple[Tensor, Tensor, int | None]:
    """Two thin matrices whose product is the form, (token, d_head); the offset if it matters."""
    transformer, head, fold = space.transformer, address.head, space.folds
    heads = heads_of(transformer, address.block)
    assert head is not None
    check_number("head", head, 0, heads.n_heads - 1, f"block {address.block}")
    if form == "vo":
        if offset:
            raise BadSettings(
                f"offset is {offset}, but W_VO does not depend on positions; leave it at 0, or "
                "ask for form='qk'"
            )
        value, output = (part(transformer, head, fold=fold) for part in (heads.value, heads.output))
        written = space.written(output, tokens, centred=centred)
        return space.read(value.T, tokens, centred=centred), written, None
    if heads.qk_reason is not None:
        raise ModelRefused(heads.qk_reason)
    query, key = (part(transformer, head, fold=fold) for part in (heads.query, heads.key))
    is_rotary = heads.positions == "rotary"
    if is_rotary:
        rotation = heads.rotation(transformer, offset)
        wide = torch.promote_types(query.dtype, torch.float32)
        query = query.to(wide) @ rotation.to(query.device, wide)
    elif offset:
        raise BadSettings(
            f"offset is {offset}, but the positions of {transformer.identity.name} are not rotary, "
            "so W_QK is the same at every offset; leave it at 0"
        )
    rows, columns = (space.read(part.T, tokens, centred=centred) for part in (query, key))
    return rows, columns, offset if is_rotary else None


class Best(NamedTuple):
    """Entries of a matrix, best first."""

    rows: Tensor
    columns: Tensor
    values: Tensor


@torch.no_grad()
def strongest(
    rows: Tensor,
    columns: Tensor,
    top: int,
    *,
    largest: Largest = "value",
    identical: bool = True,
    progress: Progress = silent,
) -> Best:
    """The best `top` entries of rows @ columns.T; equal ones are ordered by row, then column.

    `largest` "negative" is for the lowest, "magnitude" for the largest absolute values; `identical`
    says whether entries on the diagonal count.
    """
    entries = _BestEntries(top, len(columns), rows)
    buffer = rows.new_empty(min(BLOCK_ROWS, len(rows)) * min(BLOCK_COLUMNS, len(columns)))
    for first in range(0, len(rows), BLOCK_ROWS):
        left = rows[first : first + BLOCK_ROWS]
        for start in range(0, len(columns), BLOCK_COLUMNS):
            right = columns[start : start + BLOCK_COLUMNS]
            product = buffer[: len(left) * len(right)].view(len(left), len(right))
            torch.mm(left, right.T, out=product)
            keys = KEYS[largest](product)
            if not identical and -len(left) < first - start < len(right):
                keys.diagonal(first - start).fill_(-torch.inf)
            entries.take(keys, product, first, start)
        progress("pairs", min(first + BLOCK_ROWS, len(rows)), len(rows), unit="tokens")
    return entries.best()


KEYS: dict[Largest, Callable[[Tensor], Tensor]] = {  # what entries are ordered by
    "value": lambda product: product,
    "negative": torch.neg,
    "magnitude": torch.abs,
}


class _BestEntries:
    """The best entries so far, and the key below which an entry cannot be among them."""

    def __init__(self, top: int, width: int, like: Tensor) -> None:
        self.top, self.width, self.floor = top, width, -torch.inf
        self.keys, self.values = like.new_empty(0), like.new_empty(0)
        self.places = torch.empty(0, dtype=torch.long, device=like.device)  # row * width + column

    def take(self, keys: Tensor, values: Tensor, first: int, start: int) -> None:
        """Look at one block; `first` and `start` are the numbers of its first row and column."""
        if float(keys.max()) < self.floor:
            return  # most blocks: one pass over entries that are still in the cache
        flat = keys.flatten()
        chosen = self._candidates(flat)
        row, column = chosen // keys.shape[1], chosen % keys.shape[1]
        self.keys = torch.cat([self.keys, flat[chosen]])
        self.values = torch.cat([self.values, values.flatten()[chosen]])
        self.places = torch.cat([self.places, (row + first) * self.width + column + start])
        by_place = self.places.argsort()
        order = by_place[self.keys[by_place].argsort(descending=True, stable=True)][: self.top]
        self.keys, self.values = self.keys[order], self.values[order]
        self.places = self.places[order]
        if len(self.keys) == self.top:
            self.floor = float(self.keys[-1])

    def _candidates(self, keys: Tensor) -> Tensor:
        """Places in the block of all entries that may be among the best, at most `top`."""
        above = (keys >= self.floor) & (keys > -torch.inf)
        if int(above.sum()) <= self.top:
            return above.nonzero()[:, 0]
        cut = keys.topk(self.top).values[-1]
        better = (keys > cut).nonzero()[:, 0]
        # Of those equal to the cut the first ones count: a block is numbered row by row.
        equal = (keys == cut).nonzero()[: self.top - len(better), 0]
        return torch.cat([better, equal])

    def best(self) -> Best:
        """What is left at the end."""
        return Best(self.places // self.width, self.places % self.width, self.values)


def _grid(label: Callable[[int], TokenLabel], best: Best, rows: Tensor, columns: Tensor) -> Grid:
    """Every entry between the first few tokens of the strongest pairs."""
    places = [list(dict.fromkeys(part.tolist()))[:GRID] for part in (best.rows, best.columns)]
    scores = (rows[places[0]] @ columns[places[1]].T).tolist()
    first, second = (tuple(map(label, part)) for part in places)
    return Grid(first, second, tuple(map(tuple, scores)))
