"""Looking things up in a finished index: settings, vectors, and how tokens are shown.

In: the path of a file that `build` finished. Out: plain values, through a read-only connection for
each call, so that any number of threads may ask at once.
"""

import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerleap.errors import BadSettings
from layerleap.lens.vocabulary.ends import Scored
from layerleap.lens.vocabulary.store import read_about, reading
from layerleap.lens.vocabulary.tokens import TokenLabel

MOST_VARIABLES = 500  # in one statement of SQLite


class End(NamedTuple):
    """Tokens at one end of a vector or cluster, strongest first."""

    ids: NDArray[Any]
    scores: NDArray[Any]

    def packed(self) -> bytes:
        """As one value of the database."""
        return self.ids.astype("<i4").tobytes() + self.scores.astype("<f2").tobytes()

    @classmethod
    def unpacked(cls, packed: bytes) -> "End":
        """The inverse of `packed`."""
        split = len(packed) * 4 // 6
        return cls(np.frombuffer(packed[:split], "<i4"), np.frombuffer(packed[split:], "<f2"))


@dataclass(frozen=True)
class BlockEntry:
    """The neurons of one block in the index, or why there are none."""

    block: int
    first: int  # id of the vector of neuron 0
    n_neurons: int  # 0 if they are not known
    reason: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"block": self.block, "n_neurons": self.n_neurons or None, "reason": self.reason}


class IndexFile:
    """A finished file. Vectors are numbered from 0, block by block."""

    def __init__(self, path: Path) -> None:
        """Read the settings; `BadArtifact` if the file is not a finished index."""
        self.path = path
        self.about = read_about(path)
        with self.reading() as connection:
            rows = connection.execute("SELECT block, first, n_neurons, reason FROM blocks")
            self.blocks = [BlockEntry(*row) for row in rows.fetchall()]
        self._known = [entry for entry in self.blocks if entry.n_neurons]
        self._firsts = [entry.first for entry in self._known]

    @property
    def n_vectors(self) -> int:
        """How many value vectors there are."""
        return sum(entry.n_neurons for entry in self.blocks)

    @property
    def top(self) -> int:
        """Tokens per end; a model may have fewer outputs than were asked for."""
        return min(self.about["settings"]["top"], self.about["tokens"])

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """A connection for one call."""
        return reading(self.path)

    def neuron(self, vector: int) -> tuple[int, int]:
        """Block and neuron of a vector."""
        entry = self._known[bisect_right(self._firsts, vector) - 1]
        return entry.block, vector - entry.first

    def vector(self, block: int, neuron: int) -> int:
        """The number of a vector; a neuron that is not in the index is an error."""
        entry = next((one for one in self.blocks if one.block == block), None)
        if entry is None:
            last = self.blocks[-1].block
            raise BadSettings(f"block {block} does not exist; expected 1 to {last}")
        if not entry.n_neurons:
            raise BadSettings(f"block {block} is not in the index: {entry.reason}")
        if not 0 <= neuron < entry.n_neurons:
            raise BadSettings(
                f"neuron {neuron} does not exist: block {block} has neurons 0 to "
                f"{entry.n_neurons - 1}"
            )
        return entry.first + neuron


def labels(connection: sqlite3.Connection, ids: Iterable[int]) -> dict[int, TokenLabel]:
    """How tokens are shown, by id."""
    rows = rows_of(connection, "id, text, label, kind FROM tokens", sorted(set(map(int, ids))))
    return {row[0]: TokenLabel(*row) for row in rows}


def rows_of(connection: sqlite3.Connection, what: str, ids: Sequence[int]) -> Iterator[Any]:
    """The columns of the rows with some ids, a few hundred ids at a time."""
    for start in range(0, len(ids), MOST_VARIABLES):
        part = ids[start : start + MOST_VARIABLES]
        marks = ",".join("?" * len(part))
        yield from connection.execute(f"SELECT {what} WHERE id IN ({marks})", part)


def ends_of(connection: sqlite3.Connection, vector: int) -> tuple[End, End]:
    """The promoted and the suppressed end of a vector."""
    rows = connection.execute("SELECT promoted, suppressed FROM vectors WHERE id = ?", (vector,))
    promoted, suppressed = map(End.unpacked, rows.fetchone())
    return promoted, suppressed


def scored(
    connection: sqlite3.Connection, ends: tuple[End, End]
) -> tuple[tuple[Scored, ...], tuple[Scored, ...]]:
    """Both ends as tokens with their scores."""
    names = labels(connection, np.concatenate([end.ids for end in ends]))
    pairs = (zip(end.ids.tolist(), end.scores.tolist(), strict=True) for end in ends)
    up, down = (tuple(Scored(names[id_], score) for id_, score in end) for end in pairs)
    return up, down
