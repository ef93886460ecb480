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

from collections.abc import Iterator, Sequence
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
            lambda found: map(asdict, found.pairs),
            tuple(map(Column, ("first", "second", "score", "first_id", "second_id"))),
            lines=lambda found: map(_line, found.pairs),
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
        kept = ("head", "form", "offset", "n_tokens", "restricted", "centred", "identical")
        return {
            **{key: getattr(self, key) for key in (*kept, "largest")},
            "roles": list(self.roles),
            **self.about,
            "note": self.note,
        }

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
    ids = _Ids(space, chosen)
    pairs = tuple(
        TokenPair(ids.label(row), ids.label(column), value)
        for row, column, value in zip(*(part.tolist() for part in best), strict=True)
    )
    return Pairs(
        str(address),
        form,
        shown,
        pairs,
        _grid(ids, best, rows, columns),
        n_tokens=len(rows),
        restricted=chosen is not None,
        centred=centred,
        identical=identical,
        largest=largest,
        about=space.about(),
        words=space.words(),
        note=_note(space, address, form),
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
    own = heads_of(transformer, address.block)
    assert head is not None
    check_number("head", head, 0, own.n_heads - 1, f"block {address.block}")
    if form == "vo":
        if offset:
            raise BadSettings(
                f"offset is {offset}, but W_VO does not depend on positions; leave it at 0, or "
                "ask for form='qk'"
            )
        value, output = (part(transformer, head, fold=fold) for part in (own.value, own.output))
        return (
            space.read(value.T, tokens, centred=centred),
            space.written(output, tokens, centred=centred),
            None,
        )
    if own.qk_reason is not None:
        raise ModelRefused(own.qk_reason)
    query, key = (part(transformer, head, fold=fold) for part in (own.query, own.key))
    if own.positions == "rotary":
        rotation = own.rotation(transformer, offset)
        wide = torch.promote_types(query.dtype, torch.float32)
        query = query.to(wide) @ rotation.to(query.device, wide)
    elif offset:
        raise BadSettings(
            f"offset is {offset}, but the positions of {transformer.identity.name} are not rotary, "
            "so W_QK is the same at every offset; leave it at 0"
        )
    return (
        space.read(query.T, tokens, centred=centred),
        space.read(key.T, tokens, centred=centred),
        offset if own.positions == "rotary" else None,
    )


def _note(space: Space, address: Address, form: Form) -> str:
    if form == "qk" and heads_of(space.transformer, address.block).is_normed:
        return "queries or keys pass a norm, so that scores lack a positive factor per token"
    return ""


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

    Args:
        rows: (n, d_head).
        columns: (m, d_head).
        top: how many entries.
        largest: "value", "negative" for the lowest, or "magnitude" for the largest absolute value.
        identical: whether entries on the diagonal count.
        progress: called after every block of rows.
    """
    kept = _Kept(top, len(columns), rows)
    buffer = rows.new_empty(min(BLOCK_ROWS, len(rows)) * min(BLOCK_COLUMNS, len(columns)))
    for first in range(0, len(rows), BLOCK_ROWS):
        own = rows[first : first + BLOCK_ROWS]
        for start in range(0, len(columns), BLOCK_COLUMNS):
            others = columns[start : start + BLOCK_COLUMNS]
            product = buffer[: len(own) * len(others)].view(len(own), len(others))
            torch.mm(own, others.T, out=product)
            keys = _keys(product, largest)
            if not identical:
                _drop_diagonal(keys, first - start)
            kept.take(keys, product, first, start)
        progress("pairs", min(first + BLOCK_ROWS, len(rows)), len(rows), unit="tokens")
    return kept.best()


def _keys(product: Tensor, largest: Largest) -> Tensor:
    """What entries are ordered by."""
    if largest == "magnitude":
        return product.abs()
    return product.neg() if largest == "negative" else product


def _drop_diagonal(keys: Tensor, offset: int) -> None:
    """Take the entries out whose row and column are the same token.

    Args:
        keys: one block.
        offset: number of its first row minus that of its first column.
    """
    if -keys.shape[0] < offset < keys.shape[1]:
        keys.diagonal(offset).fill_(-torch.inf)


class _Kept:
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
        found = self._candidates(flat)
        row, column = found // keys.shape[1], found % keys.shape[1]
        self.keys = torch.cat([self.keys, flat[found]])
        self.values = torch.cat([self.values, values.flatten()[found]])
        self.places = torch.cat([self.places, (row + first) * self.width + column + start])
        self._trim()

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

    def _trim(self) -> None:
        by_place = self.places.argsort()
        order = by_place[self.keys[by_place].argsort(descending=True, stable=True)][: self.top]
        self.keys, self.values, self.places = (
            part[order] for part in (self.keys, self.values, self.places)
        )
        if len(self.keys) == self.top:
            self.floor = float(self.keys[-1])

    def best(self) -> Best:
        """What is left at the end."""
        return Best(self.places // self.width, self.places % self.width, self.values)


class _Ids:
    """Places in the factors as tokens."""

    def __init__(self, space: Space, chosen: Tensor | None) -> None:
        self.space, self.ids = space, None if chosen is None else chosen.tolist()

    def label(self, place: int) -> TokenLabel:
        """The token of a row or column."""
        id_ = place if self.ids is None else self.ids[place]
        return token_label(self.space.transformer, id_)


def _grid(ids: _Ids, best: Best, rows: Tensor, columns: Tensor) -> Grid:
    """Every entry between the first few tokens of the strongest pairs."""
    places = [list(dict.fromkeys(part.tolist()))[:GRID] for part in (best.rows, best.columns)]
    scores = (rows[places[0]] @ columns[places[1]].T).tolist()
    first, second = (tuple(ids.label(place) for place in part) for part in places)
    return Grid(first, second, tuple(map(tuple, scores)))
