"""Rows of all layers spilled to one file, for maps that are trained and not solved.

In: the rows that enter the moments, batch by batch. Out: one file of at most `limit` rows, a
uniform sample of all, and its header; read back by memory map, a few rows at a time.

The header is written last, so a file without one is not whole and is never read. A row's place
depends on its number alone: a resumed run writes what the lost one wrote, to the same places.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, NotFinite, WrongModel
from layerleap.files import clear_write_errors, read_json, write_json
from layerleap.models.transformer import Transformer

FORMAT = 1


@dataclass(frozen=True)
class RowFile:
    """Where rows are kept, and how many at most; a row of 30 layers of 576 takes 71 kB.

    The first `limit` rows would not do: batches are sorted by length within a window of texts,
    so the first rows are those of the shortest texts.
    """

    path: Path
    limit: int = 24_000
    seed: int = 0  # decides which rows are kept when there are more

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise BadSettings(f"a limit of {self.limit} rows keeps none; 1 or more was wanted")

    @property
    def header(self) -> Path:
        """The JSON file beside the rows that says how many count, and of what model they are."""
        return self.path.with_name(f"{self.path.name}.json")

    def settings(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {"limit": self.limit, "seed": self.seed}

    def numbers(self, seen: int) -> Tensor:
        """Which row of a pass of `seen` rows each row of the file is: (row,).

        What is known of every row of the pass can then be cut to the rows that were kept.
        """
        every = np.arange(seen)
        places = _places(every, self.limit, self.seed)
        is_kept = places < self.limit
        found = np.empty(min(seen, self.limit), dtype=np.int64)
        found[places[is_kept]] = every[is_kept]  # of several at one place, the last, as written
        return torch.from_numpy(found)

    def remove(self) -> None:
        """Delete the rows and their header."""
        self.header.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def open(self) -> "Rows":
        """The rows of a finished run; anything else is a `BadArtifact`."""
        said = read_json(self.header)
        match said:
            case {
                "format": int(number), "rows": int(n), "n_layers": int(n_layers),
                "d_model": int(d_model), "model": dict(model),
            } if number == FORMAT and min(n, n_layers, d_model) > 0:  # fmt: skip
                pass
            case _:
                raise BadArtifact(f"{self.header} is no header of rows of format {FORMAT}")
        record = _record(n_layers, d_model)
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size != n * record.itemsize:
            raise BadArtifact(
                f"{self.path} has {size} bytes; {n * record.itemsize} were wanted for its {n} "
                "rows, make it again"
            )
        records = np.memmap(self.path, dtype=record, mode="r", shape=(n,))
        return Rows(records, np.arange(n), model)


def _record(n_layers: int, d_model: int) -> np.dtype[Any]:
    """One row: the document it is of, and its states of all layers side by side."""
    return np.dtype([("document", "<i8"), ("states", "<f4", (n_layers + 1, d_model))])


class RowWriter:
    """Puts rows where they belong in the file of a run that is under way."""

    def __init__(self, target: RowFile, transformer: Transformer, seen: int) -> None:
        """A new file, or the one of an earlier run that has put `seen` rows into its checkpoint."""
        self.target, self.seen = target, seen
        self.about = {
            "format": FORMAT, "n_layers": transformer.n_layers, "d_model": transformer.d_model,
            "model": transformer.identity.to_dict(), **target.settings(),
        }  # fmt: skip
        self.record = _record(transformer.n_layers, transformer.d_model)
        if seen:
            self._go_on()
        with clear_write_errors(target.path, ours=True):
            target.path.parent.mkdir(parents=True, exist_ok=True)
            target.header.unlink(missing_ok=True)
            target.path.open("ab").close()
            # Unbuffered: what a checkpoint counts has left this process before it is saved.
            self.file = target.path.open("r+b", buffering=0)
            self.file.truncate(min(seen, target.limit) * self.record.itemsize)

    def _go_on(self) -> None:
        path, wanted = self.target.path, min(self.seen, self.target.limit) * self.record.itemsize
        size = path.stat().st_size if path.is_file() else 0
        if size < wanted:
            raise BadArtifact(
                f"{path} has {size} bytes, but the checkpoint says that at least {wanted} were "
                "written; delete the checkpoint to start anew"
            )

    def add(self, states: Sequence[Tensor], documents: Tensor) -> None:
        """Take in the rows of one batch: states[l] holds the rows of h[l]."""
        records = np.empty(len(documents), self.record)
        records["document"] = documents.numpy()
        for layer, h in enumerate(states):
            records["states"][:, layer] = h.detach().float().cpu().numpy()
        if not np.isfinite(records["states"]).all():
            raise NotFinite("states leave the range of float32, in which rows are kept")
        numbers = np.arange(self.seen, self.seen + len(records))
        places = _places(numbers, self.target.limit, self.target.seed)
        with clear_write_errors(self.target.path, ours=True):
            for place, record in zip(places.tolist(), records, strict=True):
                if place < self.target.limit:
                    self.file.seek(place * self.record.itemsize)
                    self.file.write(record.tobytes())
        self.seen += len(records)

    def close(self) -> None:
        """Let go of a file that is not whole yet."""
        self.file.close()

    def finish(self) -> None:
        """Declare the file whole."""
        self.close()
        rows = min(self.seen, self.target.limit)
        write_json(self.target.header, {**self.about, "rows": rows})


def _places(numbers: "np.ndarray[Any, Any]", limit: int, seed: int) -> "np.ndarray[Any, Any]":
    """Where each row goes; at or past the limit, nowhere.

    The first rows fill the file; row i then takes a random place in 0 .. i, and is kept if that
    is in the file: after any number of rows each has had the same chance (Vitter's algorithm R).
    """
    counted = numbers.astype(np.uint64) + np.uint64(1)  # unsigned: products wrap around
    mixed = counted * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    drawn = (mixed % counted).astype(np.int64)
    return np.where(numbers < limit, numbers, drawn)


class Rows:
    """Rows of a finished file, or some of them; read from disk when they are asked for."""

    def __init__(
        self,
        records: "np.ndarray[Any, Any]",
        chosen: "np.ndarray[Any, Any]",
        model: Mapping[str, Any],
    ) -> None:
        """Made by `RowFile.open`.

        Args:
            records: the memory map.
            chosen: which of its rows these are.
            model: the identity of the model, as JSON types.
        """
        self._records, self._chosen = records, chosen
        self.model = dict(model)
        width = records.dtype["states"].shape
        self.n_layers, self.d_model = width[0] - 1, width[1]

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def documents(self) -> Tensor:
        """Which document each row is of: (row,)."""
        return torch.from_numpy(self._records["document"][self._chosen].astype(np.int64))

    def states(self, which: Sequence[int] | Tensor | slice) -> Tensor:
        """Some rows of all layers: (row, n_layers + 1, d_model), float32."""
        wanted = which if isinstance(which, slice) else np.asarray(which)
        return torch.from_numpy(self._records["states"][self._chosen[wanted]])

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        """h[layers[i]] of row rows[i], for each i: (cell, d_model), float32."""
        chosen = self._chosen[np.asarray(rows)]
        return torch.from_numpy(self._records["states"][chosen, np.asarray(layers)])

    def split(self, share: float, seed: int = 0) -> tuple["Rows", "Rows"]:
        """The rows of most documents, and those of a random share of the documents."""
        if not 0 < share < 1:
            raise BadSettings(f"share {share} leaves one side without documents; 0 to 1 was wanted")
        documents = self.documents.numpy()
        names = np.random.default_rng(seed).permutation(np.unique(documents))
        if len(names) < 2:
            raise BadSettings(
                f"rows of {len(names)} document cannot be split by document; give more documents"
            )
        n_other = min(max(1, round(share * len(names))), len(names) - 1)
        is_other = np.isin(documents, names[:n_other])
        sides = (self._chosen[~is_other], self._chosen[is_other])
        most, rest = (Rows(self._records, side, self.model) for side in sides)
        return most, rest

    def fingerprint(self) -> str:
        """A hash of which rows these are: all documents, and the states of some hundred rows."""
        digest = hashlib.sha256(self._chosen.astype("<i8").tobytes())
        digest.update(self._records["document"][self._chosen].tobytes())
        some = np.linspace(0, len(self) - 1, min(len(self), 128)).round().astype(np.int64)
        digest.update(self._records["states"][self._chosen[some]].tobytes())
        return digest.hexdigest()

    def check_model(self, transformer: Transformer) -> None:
        """Raise `WrongModel` unless the rows are states of exactly these weights."""
        if self.model.get("fingerprint") != transformer.identity.fingerprint:
            raise WrongModel(
                f"these rows are of {self.model.get('name')} (weights "
                f"{str(self.model.get('fingerprint'))[:8]}), but the weights of "
                f"{transformer.identity.name} are {transformer.identity.fingerprint[:8]}; "
                "collect rows of it"
            )
