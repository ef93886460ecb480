"""Saved sessions and the names of vectors: one SQLite file, shared by all servers on a machine.

In: what the page saves, under the model's fingerprint. Out: the same, after any crash: SQLite's
write-ahead log makes each write whole or not done at all.
"""

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerleap.errors import BadArtifact, BadSettings, CannotWrite
from layerleap.files import cache_root, clear_write_errors
from layerleap.show.web import limits

FORMAT = 1
TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    model TEXT NOT NULL, id TEXT NOT NULL, title TEXT NOT NULL, state TEXT NOT NULL,
    updated REAL NOT NULL, PRIMARY KEY (model, id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS names (
    model TEXT NOT NULL, block INTEGER NOT NULL, neuron INTEGER NOT NULL,
    name TEXT NOT NULL, note TEXT NOT NULL, PRIMARY KEY (model, block, neuron)
) WITHOUT ROWID;
"""
PATIENCE = 10.0  # seconds to wait while another process writes


class Store:
    """Sessions and names of one model."""

    def __init__(self, model: str, path: Path | None = None, *, sessions: int = 500) -> None:
        """`model` is a fingerprint; at most `sessions` are kept for it."""
        self.model, self.room = model, sessions
        self.path = path or cache_root() / "debugger.sqlite"
        self._lock = threading.Lock()  # one connection serves all threads
        with clear_write_errors(self.path, ours=True):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._clear_errors():
            self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(
            self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        _use_write_ahead_log(database)
        database.execute("PRAGMA synchronous=FULL")  # a saved session survives a power cut, too
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, FORMAT):
            database.close()
            raise BadArtifact(
                f"{self.path} has format {version}, expected {FORMAT}; "
                "move it away or use the version of layerleap that wrote it"
            )
        database.executescript(TABLES)
        database.execute(f"PRAGMA user_version={FORMAT}")
        return database

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()

    def sessions(self) -> list[dict[str, Any]]:
        """All sessions without their states, the newest first."""
        rows = self._read(
            "SELECT id, title, updated FROM sessions WHERE model=? ORDER BY updated DESC, id",
            (self.model,),
        )
        return [{"id": id, "title": title, "updated": updated} for id, title, updated in rows]

    def session(self, id: str) -> dict[str, Any] | None:
        """One session, or None."""
        rows = self._read(
            "SELECT title, state, updated FROM sessions WHERE model=? AND id=?", (self.model, id)
        )
        if not rows:
            return None
        title, state, updated = rows[0]
        return {"id": id, "title": title, "state": json.loads(state), "updated": updated}

    def save_session(self, id: str, title: str, state: dict[str, Any]) -> dict[str, Any]:
        """Write or replace a session."""
        text, now = state_text(state), time.time()
        if (size := len(text.encode())) > limits.STATE:
            raise BadSettings(f"the state has {size:,} bytes; at most {limits.STATE:,} are kept")
        with self._writing() as database:
            others = database.execute(
                "SELECT count(*) FROM sessions WHERE model=? AND id<>?", (self.model, id)
            ).fetchone()[0]
            if others >= self.room:
                raise BadSettings(
                    f"{others} sessions are saved for this model, which is the most that are kept; "
                    "delete some first"
                )
            database.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)",
                (self.model, id, title, text, now),
            )
        return {"id": id, "title": title, "updated": now}

    def delete_session(self, id: str) -> bool:
        """Remove a session; False if there was none."""
        with self._writing() as database:
            done = database.execute("DELETE FROM sessions WHERE model=? AND id=?", (self.model, id))
            return done.rowcount > 0

    def name(self, block: int, neuron: int) -> tuple[str | None, str | None]:
        """Name and note of a vector."""
        rows = self._read(
            "SELECT name, note FROM names WHERE model=? AND block=? AND neuron=?",
            (self.model, block, neuron),
        )
        return (rows[0][0] or None, rows[0][1] or None) if rows else (None, None)

    def names(self, neurons: Iterable[tuple[int, int]]) -> dict[tuple[int, int], str]:
        """The names of those of the vectors that have one."""
        return {neuron: name for neuron in set(neurons) if (name := self.name(*neuron)[0])}

    def save_name(self, block: int, neuron: int, name: str, note: str) -> None:
        """Name a vector; an empty name and note take it away."""
        key = (self.model, block, neuron)
        with self._writing() as database:
            if name or note:
                database.execute(
                    "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?, ?)", (*key, name, note)
                )
            else:
                database.execute("DELETE FROM names WHERE model=? AND block=? AND neuron=?", key)

    def _read(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._lock, self._clear_errors():
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which takes the right to write at once and not half-way."""
        with self._lock, self._clear_errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise CannotWrite(
                f"cannot use {self.path}: {error}; free some space, check its permissions, or set "
                "LAYERLEAP_CACHE to another folder"
            ) from error
        except sqlite3.DatabaseError as error:
            raise BadArtifact(
                f"{self.path} is not a file of sessions ({error}); move it, and a new one is made"
            ) from error


def state_text(state: dict[str, Any]) -> str:
    """A state as JSON; what JSON or a reader of it cannot carry is a `ValueError`."""
    try:
        text = json.dumps(state, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()  # half of a surrogate pair has no bytes
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return text


def _use_write_ahead_log(database: sqlite3.Connection) -> None:
    """Wait for other processes that open the new file: SQLite's own time-out leaves this out."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            database.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
