"""The file of a concept index: one SQLite database, built step by step, then never changed.

In: what the steps of `build` write. Out: the finished file under its final name.

    about      settings, the model's identity and counts, as JSON
    blocks     number of neurons of each block, or why they are not known; id of its first vector
    vectors    norm and both ends of each value vector: int32 ids, then float16 scores
    ranges     natural range of each coefficient
    tokens     text, label and kind of each output; `words` is their full-text index (FTS5)
    postings   by token and end, the vectors that have it there, and its ranks
    clusters, members

While it is being built the file has another name, next to the final one. Each step is one
transaction, so a killed build goes on where it stopped, and a file with the final name is finished.
"""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from layerleap.errors import BadArtifact, CannotFetch, CannotWrite
from layerleap.files import clear_write_errors

FORMAT = 1
PROMOTED, SUPPRESSED = 0, 1  # the ends, as numbered in `postings`
SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE steps (name TEXT PRIMARY KEY);
CREATE TABLE blocks (
    block INTEGER PRIMARY KEY, first INTEGER NOT NULL, n_neurons INTEGER NOT NULL, reason TEXT
);
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY, norm REAL NOT NULL, promoted BLOB NOT NULL, suppressed BLOB NOT NULL
);
CREATE TABLE ranges (
    id INTEGER PRIMARY KEY, low REAL NOT NULL, mean REAL NOT NULL, high REAL NOT NULL,
    std REAL NOT NULL, positive REAL NOT NULL
);
CREATE TABLE tokens (
    id INTEGER PRIMARY KEY, text TEXT NOT NULL, label TEXT NOT NULL, kind TEXT NOT NULL
);
CREATE INDEX token_texts ON tokens (text);
CREATE VIRTUAL TABLE words USING fts5 (
    text, content='', detail=full, prefix='2 3',
    tokenize="unicode61 remove_diacritics 2 categories 'L* N* Co M*'"
);
CREATE TABLE postings (
    id INTEGER PRIMARY KEY, vectors BLOB NOT NULL, ranks BLOB NOT NULL
);
CREATE TABLE clusters (
    number INTEGER PRIMARY KEY, size INTEGER NOT NULL, promoted BLOB NOT NULL,
    suppressed BLOB NOT NULL
);
CREATE TABLE members (vector INTEGER PRIMARY KEY, cluster INTEGER NOT NULL, cosine REAL NOT NULL);
CREATE INDEX cluster_members ON members (cluster, cosine DESC);
"""


class Building:
    """A file that is being built; a context manager that holds it against other builders."""

    def __init__(self, target: Path, settings: Mapping[str, Any]) -> None:
        self.target, self.settings = target, dict(settings)
        self.path = building_path(target)
        self.connection: sqlite3.Connection

    def __enter__(self) -> "Building":
        with clear_write_errors(self.target, ours=True):
            self.target.parent.mkdir(parents=True, exist_ok=True)
        with _clear_errors(self.target):
            self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # an unfinished transaction is rolled back

    def _open(self) -> None:
        try:
            begun = self._begin()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, no space, no permission
                raise
            begun = False  # damaged, so it holds nothing worth keeping
        if not begun:
            self.path.unlink(missing_ok=True)
            self._drop_journal()
            if not self._begin():
                raise CannotWrite(f"cannot begin {self.path}; remove it and try again")

    def _begin(self) -> bool:
        """Open and lock the file; False if it was begun with other settings."""
        self.connection = sqlite3.connect(self.path, timeout=1, isolation_level=None)
        try:
            # The lock is held until the connection is closed, even by a kill.
            self.connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            self.connection.execute("BEGIN EXCLUSIVE")
            known = self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if not known:
                self.connection.execute("COMMIT")
                self.connection.executescript(f"BEGIN EXCLUSIVE;{SCHEMA}")
                self.note("settings", self.settings)
            is_ours = about(self.connection).get("settings") == self.settings
            self.connection.execute("COMMIT")
        except BaseException:
            self.connection.close()
            raise
        if not is_ours:
            self.connection.close()
        return is_ours

    def note(self, key: str, value: Any) -> None:
        """Put an entry into `about`."""
        row = (key, json.dumps(value, ensure_ascii=False, allow_nan=False))
        self.connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", row)

    def is_done(self, step: str) -> bool:
        """True if an earlier run finished this step."""
        rows = self.connection.execute("SELECT 1 FROM steps WHERE name = ?", (step,))
        return rows.fetchone() is not None

    @contextmanager
    def step(self, name: str) -> Iterator[sqlite3.Connection]:
        """One step as one transaction: all of it is kept, or nothing."""
        with _clear_errors(self.target):
            self.connection.execute("BEGIN")
            try:
                yield self.connection
                self.connection.execute("INSERT INTO steps VALUES (?)", (name,))
                self.connection.execute("COMMIT")
            except BaseException:
                self.connection.rollback()
                raise

    def finish(self) -> None:
        """Give the file its final name."""
        with _clear_errors(self.target):
            if "format" not in about(self.connection):
                self.note("format", FORMAT)  # only a finished file has it
            self.connection.close()
        with clear_write_errors(self.target, ours=True):
            self._drop_journal()  # empty by now; some versions leave it behind
            try:
                os.replace(self.path, self.target)
            except FileNotFoundError:
                if not self.target.is_file():  # else another process has just done the same
                    raise

    def _drop_journal(self) -> None:
        self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)


def finished_steps(target: Path, settings: Mapping[str, Any]) -> frozenset[str]:
    """The steps that an interrupted build has kept; raises `CannotWrite` if one is running."""
    building = Building(target, settings)
    if not building.path.is_file():
        return frozenset()
    address = f"{building.path.resolve().as_uri()}?mode=ro"
    with (
        _clear_errors(target),
        closing(sqlite3.connect(address, uri=True, timeout=0)) as connection,
    ):
        try:
            if about(connection).get("settings") != building.settings:
                return frozenset()  # it will be built again
            return frozenset(name for (name,) in connection.execute("SELECT name FROM steps"))
        except sqlite3.DatabaseError as error:
            if _is_locked(error):
                raise
            return frozenset()  # damaged, or killed before it had begun: nothing is kept


def _is_locked(error: sqlite3.Error) -> bool:
    return "locked" in str(error)


@contextmanager
def _clear_errors(target: Path) -> Iterator[None]:
    """Turn errors of SQLite into one of ours about the file."""
    try:
        yield
    except sqlite3.Error as error:
        if _is_locked(error):
            raise CannotWrite(
                f"another process is building {target}; wait for it, or choose another file"
            ) from error
        if "no such module" in str(error):
            raise CannotFetch(
                f"the SQLite library of this Python lacks full-text search ({error}); use a Python "
                "whose sqlite3 has FTS5"
            ) from error
        raise CannotWrite(
            f"cannot write {target}: {error}; free some space or choose another location"
        ) from error


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection for one call; a finished file never changes, so no lock is needed.

    One per call, not per thread: opening takes a fraction of a millisecond, and nothing is left
    open by threads that end.
    """
    address = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True, check_same_thread=False)) as connection:
            yield connection
    except sqlite3.DatabaseError as error:
        raise BadArtifact(
            f"{path} is damaged or not a concept index ({error}); delete it and build it again"
        ) from error


def about(connection: sqlite3.Connection) -> dict[str, Any]:
    """The entries of `about`."""
    rows = connection.execute("SELECT key, value FROM about")
    return {key: json.loads(value) for key, value in rows}


def read_about(path: Path) -> dict[str, Any]:
    """The entries of `about` of a finished file; anything else is a `BadArtifact`."""
    if not path.is_file():
        raise BadArtifact(f"there is no concept index {path}; build one with: layerleap index")
    with reading(path) as connection:
        entries = about(connection)
    if entries.get("format") != FORMAT:
        raise BadArtifact(
            f"{path} is not a finished concept index of format {FORMAT}; build it again"
        )
    return entries


def check_not_building(target: Path) -> None:
    """Refuse a file that another process is building."""
    path = building_path(target)
    if not path.is_file():
        return
    with _clear_errors(target), closing(sqlite3.connect(path, timeout=0)) as connection:
        try:
            connection.execute("BEGIN EXCLUSIVE")
            connection.rollback()
        except sqlite3.DatabaseError as error:
            if _is_locked(error):
                raise  # else it is damaged, which nobody is building


def check_none_building(folder: Path, model: str, settings: Mapping[str, Any]) -> None:
    """Refuse if another process is building the index of this model, with these settings.

    For models whose name says which weights they have; others are only known once they are loaded.
    """
    for path in folder.glob(".*.building"):
        target = path.with_name(path.name.removeprefix(".").removesuffix(".building"))
        try:
            check_not_building(target)
        except CannotWrite:
            with suppress(BadArtifact, sqlite3.Error), reading(path) as connection:
                known = about(connection)
                is_same = all(known["settings"].get(key) == settings[key] for key in settings)
                if is_same and known.get("model", {}).get("name") == model:
                    raise


def building_path(target: Path) -> Path:
    """The file's name while it is being built."""
    return target.with_name(f".{target.name}.building")
