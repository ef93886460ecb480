"""Searching value vectors by the words they promote or suppress.

In: an index and a few words.
Out: `Matches`: the vectors whose ends hold most of the words, and hold them highest.

    closeness of a token   1 for a vector's first token, falling to 1 / top for its last
    score of a vector      mean over the words of (1 + closeness) / 2, 0 for a word it does not have

So a vector with two of the words always comes before one with a single word, and 1.0 means that it
has all words first. Equal scores are ordered by the closeness of all matching tokens together:
"guitar", " Guitar" and " guitars" say more than " guitar" alone.

A token matches a word if the word is in its text, whatever the case and accents (FTS5), with or
without a leading space; "guitar*" also matches what begins like that. A word that is not a token is
searched by the longest token that it begins with. Such a match is partial: it counts closeness / 2
at most, less than any whole word, and the result says so and names tokens that resemble the word.
"""

import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import chain
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from layerleap.errors import BadSettings, check_choice
from layerleap.lens.vocabulary.index_settings import SearchSide, Space, split_query
from layerleap.lens.vocabulary.lookup import IndexFile, ends_of, labels, rows_of
from layerleap.lens.vocabulary.store import PROMOTED, SUPPRESSED
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.results.base import Result
from layerleap.results.cells import Grid, grid_of
from layerleap.results.columns import Column, Row, Table
from layerleap.results.plain import Plain, plain

SIDES = {"both": (PROMOTED, SUPPRESSED), "promoted": (PROMOTED,), "suppressed": (SUPPRESSED,)}
SIDE_NAMES: tuple[Literal["promoted"], Literal["suppressed"]] = ("promoted", "suppressed")
ENDS = {"promoted": "promotes", "suppressed": "suppresses"}  # the field of a match
TIES = 2**24  # above any sum of places, so that it only decides between equal scores
SHORTEST_PIECE = 3  # letters of the beginning that stands for a word without a token
KEYS = ("block", "neuron", "score", "side", "matched", "promotes", "suppresses")  # of a data frame
SHOWN = 10  # tokens per end in a result


@dataclass(frozen=True)
class Match(Plain):
    """A value vector that has some of the words."""

    SHOWN: ClassVar[tuple[str, ...]] = ("name",)

    block: int
    neuron: int
    score: float  # above 0, at most 1
    side: Literal["promoted", "suppressed"]  # the end that has the words
    matched: tuple[TokenLabel, ...]  # the tokens that match, highest first
    promotes: tuple[TokenLabel, ...]
    suppresses: tuple[TokenLabel, ...]
    partial: bool = False  # no word matches whole: only the beginnings of words that are no tokens

    @property
    def name(self) -> str:
        """As in edits: L12.N34."""
        return f"L{self.block}.N{self.neuron}"

    @property
    def matching(self) -> tuple[TokenLabel, ...]:
        """The first tokens of the end that has the words, then those that match further down."""
        first = getattr(self, ENDS[self.side])
        return (*first, *(token for token in self.matched if token not in first))


class Matches(Result, list[Match]):
    """The vectors that match a query, best first, and what became of its words."""

    KIND: ClassVar[str] = "concepts"
    FACTS: ClassVar[tuple[str, ...]] = ("query", "missing", "pieces", "meant")
    LEGEND: ClassVar[str] = (
        "score: 1.00 has every word first; bold: tokens that match; a positive coefficient "
        "promotes and suppresses these tokens, a negative one the other way round"
    )
    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "results",
            "",
            plain,
            (
                Column("name", "neuron"),
                Column("score", form="{:.2f}", note="partial"),
                Column("side"),
                Column("promotes", strong="matched"),
                Column("suppresses", strong="matched"),
            ),
            lines=lambda matches: map(_line, matches),
            keys=KEYS,
        ),
    )

    def __init__(
        self,
        query: str,
        matches: Iterable[Match],
        missing: list[str],
        pieces: dict[str, str],
        meant: dict[str, list[str]] | None = None,
    ) -> None:
        super().__init__(matches)
        self.meant = meant or {}  # by word that is not a token, tokens that resemble it
        self.query = query
        self.missing = missing  # words without a token
        self.pieces = pieces  # by word that is not a token, the token it begins with

    @property
    def notes(self) -> list[str]:
        """What became of words that are not tokens, a sentence each."""
        notes = [
            f"{word!r} is not a token of this model; searched for {piece!r} instead, which gives "
            f"partial matches, ranked last{self._meant(word)}."
            for word, piece in self.pieces.items()
        ]
        nothing = "no token of this model begins a word with"
        return notes + [f"{nothing} {word!r}{self._meant(word)}." for word in self.missing]

    def _meant(self, word: str) -> str:
        tokens = " or ".join(map(repr, self.meant.get(word, ())))
        return f"; did you mean {tokens}?" if tokens else ""

    def headline(self) -> str:
        """What was searched for."""
        none = "" if self else ": no neuron has these words among its tokens"
        return f"neurons for {self.query!r}{none}"

    def grids(self, width: int | None = None) -> list[Grid]:
        """The end that has the words shows every token that matches."""
        rows = []
        for match in self:
            row = match.to_dict()
            row[ENDS[match.side]] = [token.to_dict() for token in match.matching]
            rows.append({**row, "partial": "(partial)" if match.partial else ""})
        return [grid_of(replace(self.TABLES[0], rows=lambda _: rows), self)] if rows else []

    def short(self) -> str:
        """What it is, in one line."""
        first = ", ".join(f"{match.name} {match.score:.2f}" for match in self[:3])
        more = ", ..." if len(self) > 3 else ""
        return f"Matches({self.query!r}: {len(self)} neurons: {first}{more})"


def _line(match: Match) -> Row:
    """What a data frame holds of one vector."""
    row = match.to_dict()
    return {key: row[key] for key in KEYS}


@dataclass
class Words:
    """The words of a query and the tokens that match each."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    pieces: dict[str, str] = field(default_factory=dict)


def search(
    index: IndexFile, query: str, *, top: int = 20, side: SearchSide = "both", space: Space = "any"
) -> Matches:
    """The vectors that match a query best; see the module for the order.

    A vector that matches at both ends is listed once, with the better one. For the arguments see
    `layerleap.search`.
    """
    check_choice(side, SearchSide, "side")
    if top < 1:
        raise BadSettings(f"top is {top}; expected 1 or more")
    with index.reading() as connection:
        words = find_tokens(connection, query, space)
        ranked = _ranked(connection, index, words, SIDES[side], top)
        matched = {token for tokens in words.tokens.values() for token in tokens}
        matches = _matches(connection, index, ranked, matched)
        unknown = [*words.pieces, *words.missing]
        meant = {word: near for word in unknown if (near := _resembling(connection, word))}
    return Matches(query, matches, words.missing, words.pieces, meant)


def find_tokens(connection: sqlite3.Connection, query: str, space: Space = "any") -> Words:
    """The tokens that match each word of a query."""
    check_choice(space, Space, "space")
    words = Words()
    for word in split_query(query):
        for piece in [word, *_beginnings(word)]:
            if tokens := _tokens(connection, piece, space):
                words.tokens[word] = tokens
                if piece != word:
                    words.pieces[word] = piece
                break
        else:
            words.missing.append(word)
    return words


def _resembling(connection: sqlite3.Connection, word: str) -> list[str]:
    """Whole tokens that a mistyped word may have meant, nearest first."""
    letters = word.strip("*")
    if not letters[:1].isalnum():
        return []
    pattern = f"{letters[0]}_%"
    rows = connection.execute(
        "SELECT text FROM tokens WHERE kind = 'text' AND (text LIKE ? OR text LIKE ?)",
        (pattern, f" {pattern}"),
    )
    known: dict[str, str] = {}
    for (text,) in rows:  # the beginning of a word where there is one: " London", not "London"
        plain = text.strip().casefold()
        if letters.casefold().startswith(plain):
            continue  # a beginning is what is searched for anyway
        if plain not in known or text[:1].isspace():
            known[plain] = text
    return [known[near] for near in get_close_matches(letters.casefold(), known, n=2, cutoff=0.75)]


def _beginnings(word: str) -> list[str]:
    """The beginnings of a word, longest first."""
    letters = word.rstrip("*")
    pieces = (letters[:n] for n in range(len(letters) - 1, SHORTEST_PIECE - 1, -1))
    return [piece for piece in pieces if piece[-1].isalnum()]


def _tokens(connection: sqlite3.Connection, word: str, space: Space) -> list[int]:
    """The ids of the tokens that contain a word, in order."""
    # Quoted, and without any sign that FTS5 could take for an operator.
    letters = " ".join(re.findall(r"\w+", word))
    if letters.strip("_ "):
        star = "*" if word.endswith("*") else ""
        statement = (
            "SELECT tokens.id, tokens.text FROM words JOIN tokens ON tokens.id = words.rowid "
            "WHERE words MATCH ? ORDER BY tokens.id"
        )
        rows = connection.execute(statement, (f'"{letters}"{star}',))
    else:  # signs only, which full-text search does not see
        statement = "SELECT id, text FROM tokens WHERE text IN (?, ?) ORDER BY id"
        rows = connection.execute(statement, (word, f" {word}"))
    starts = {"any": (True, False), "with": (True,), "without": (False,)}[space]
    return [id_ for id_, text in rows if text[:1].isspace() in starts]


def _ranked(
    connection: sqlite3.Connection, index: IndexFile, words: Words, ends: tuple[int, ...], top: int
) -> list[tuple[int, int, float, bool]]:
    """(vector, end, score, whether it has only beginnings of words) of the best ones."""
    if not words.tokens:
        return []
    n = len(words.tokens)
    points = np.stack([_points(connection, index, words, end) for end in ends])
    better = points.argmax(0)  # the better end of each vector; the first one if both are as good
    points = points.max(0)
    vectors = np.flatnonzero(points)
    full, whole = 2 * index.top * n * n, n * (index.top + 1)
    places = points // TIES
    best = vectors[np.argsort(-points[vectors], kind="stable")][:top].tolist()
    scores = (int(places[vector]) for vector in best)
    return [
        (vector, ends[better[vector]], round(score / full, 6), score < whole)
        for vector, score in zip(best, scores, strict=True)
    ]


def _points(
    connection: sqlite3.Connection, index: IndexFile, words: Words, end: int
) -> NDArray[np.int64]:
    """By vector, TIES times its score at one end plus the closeness of all matching tokens.

    Both are counted in places, `top` for the first one: whole numbers, so that ties are exact.
    """
    points = np.zeros(index.n_vectors, np.int64)
    n = len(words.tokens)
    for word, tokens in words.tokens.items():
        ids = [2 * token + end for token in tokens]
        postings = list(rows_of(connection, "vectors, ranks FROM postings", ids))
        vectors = np.frombuffer(b"".join(row[0] for row in postings), "<i4")
        ranks = np.frombuffer(b"".join(row[1] for row in postings), np.uint8)
        places = index.top - ranks.astype(np.int64)
        best = np.zeros_like(points)
        np.maximum.at(best, vectors, places)
        np.add.at(points, vectors, places)
        # Beginnings of all other words together count less than one whole word.
        points += (best if word in words.pieces else (best > 0) * n * (index.top + best)) * TIES
    return points


def _matches(
    connection: sqlite3.Connection,
    index: IndexFile,
    ranked: list[tuple[int, int, float, bool]],
    matched: set[int],
) -> list[Match]:
    matches = []
    for vector, end, score, partial in ranked:
        ends = [side.ids.tolist() for side in ends_of(connection, vector)]
        hits = [id_ for id_ in ends[end] if id_ in matched]
        lists = (hits, ends[PROMOTED][:SHOWN], ends[SUPPRESSED][:SHOWN])
        names = labels(connection, chain(*lists))
        hit, up, down = (tuple(names[id_] for id_ in ids) for ids in lists)
        place = index.neuron(vector)
        matches.append(Match(*place, score, SIDE_NAMES[end], hit, up, down, partial))
    return matches
