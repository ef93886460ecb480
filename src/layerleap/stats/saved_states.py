"""Hidden states of all layers saved to one file, for maps that are trained, not solved.

In: the rows that enter the moments, batch by batch. Out: one file with at most `limit` rows, a
uniform sample of all, and a JSON header. Reading uses a memory map, a few rows at a time.

The header is written last: a file without one is incomplete and is never read. A row's place in
the file depends only on its number, so a resumed run writes the same rows to the same places.
"""

import hashlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, NotFinite, WrongModel
from layerleap.files import clear_write_errors, read_json, write_json
from layerleap.models.transformer import Transformer

FORMAT = 1
Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True)
class StateFile:
    """Where states are saved, and how many rows at most; a row of 30 layers of 576 takes 71 kB.

    Saving the first `limit` rows would be biased: batches are sorted by length within a window of
    texts, so the first rows come from the shortest texts.
    """

    path: str | Path
    limit: int = 24_000
    seed: int = 0  # selects the rows if there are more than `limit`

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise BadSettings(f"a limit of {self.limit} rows saves nothing; expected 1 or more")

    @property
    def file(self) -> Path:
        """The file of the states."""
        return Path(self.path)

    @property
    def header(self) -> Path:
        """The JSON file next to the states: number of rows, shape and model."""
        return self.file.with_name(f"{self.file.name}.json")

    def settings(self) -> dict[str, Any]:
        """The settings a resumed run must repeat."""
        return {"limit": self.limit, "seed": self.seed}

    def row_numbers(self, n_rows: int) -> Tensor:
        """For each row in the file, its number within the pass of `n_rows` rows: (row,).

        Use it to select the matching entries of anything else recorded during the pass.
        """
        numbers = np.arange(n_rows)
        places = _places(numbers, self.limit, self.seed)
        is_saved = places < self.limit
        by_place = np.empty(min(n_rows, self.limit), dtype=np.int64)
        by_place[places[is_saved]] = numbers[is_saved]  # later rows overwrite, as in the file
        return torch.from_numpy(by_place)

    def remove(self) -> None:
        """Delete the states and their header."""
        self.header.unlink(missing_ok=True)
        self.file.unlink(missing_ok=True)

    def open(self) -> "SavedStates":
        """The states of a finished run; anything else is a `BadArtifact`."""
        match read_json(self.header):
            case {
                "format": int(number),
                "rows": int(n),
                "n_layers": int(n_layers),
                "d_model": int(d_model),
                "model": dict(model),
            } if number == FORMAT and min(n, n_layers, d_model) > 0:
                pass
            case _:
                raise BadArtifact(f"{self.header} is not a header of saved states, format {FORMAT}")
        record = _record(n_layers, d_model)
        size = self.file.stat().st_size if self.file.is_file() else 0
        if size != n * record.itemsize:
            raise BadArtifact(
                f"{self.file} has {size} bytes; expected {n * record.itemsize} for {n} rows, "
                "recreate it"
            )
        records = np.memmap(self.file, dtype=record, mode="r", shape=(n,))
        return SavedStates(records, np.arange(n), model)


def _record(n_layers: int, d_model: int) -> np.dtype[Any]:
    """One row: its document, and its states at all layers."""
    return np.dtype([("document", "<i8"), ("states", "<f4", (n_layers + 1, d_model))])


class StateWriter:
    """Writes the states of a pass that is still running."""

    def __init__(self, target: StateFile, transformer: Transformer, n_rows: int) -> None:
        """Start a new file, or continue one whose checkpoint counts `n_rows` rows."""
        self.target, self.n_rows = target, n_rows
        self.about = {
            "format": FORMAT,
            "n_layers": transformer.n_layers,
            "d_model": transformer.d_model,
            "model": transformer.identity.to_dict(),
            **target.settings(),
        }
        self.record = _record(transformer.n_layers, transformer.d_model)
        path, least = target.file, min(n_rows, target.limit) * self.record.itemsize
        size = path.stat().st_size if path.is_file() else 0
        if size < least:
            raise BadArtifact(
                f"{path} has {size} bytes, but its checkpoint counts at least {least}; delete the "
                "checkpoint to start over"
            )
        with clear_write_errors(path, ours=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            target.header.unlink(missing_ok=True)
            path.open("ab").close()
            # Unbuffered: rows counted by a checkpoint have left this process before it is saved.
            self.file = path.open("r+b", buffering=0)
            self.file.truncate(least)

    def add(self, states: Sequence[Tensor], documents: Tensor) -> None:
        """Add the rows of one batch: states[l] holds the rows of h[l]."""
        records = np.empty(len(documents), self.record)
        records["document"] = documents.numpy()
        for layer, h in enumerate(states):
            records["states"][:, layer] = h.detach().float().cpu().numpy()
        if not np.isfinite(records["states"]).all():
            raise NotFinite("some states exceed the range of float32, in which they are saved")
        numbers = np.arange(self.n_rows, self.n_rows + len(records))
        places = _places(numbers, self.target.limit, self.target.seed)
        with clear_write_errors(self.target.file, ours=True):
            for place, record in zip(places.tolist(), records, strict=True):
                if place < self.target.limit:
                    self.file.seek(place * self.record.itemsize)
                    self.file.write(record.tobytes())
        self.n_rows += len(records)

    def close(self) -> None:
        """Close the file; without `finish` it stays incomplete."""
        self.file.close()

    def finish(self) -> None:
        """Close the file and write its header, which makes it complete."""
        self.close()
        rows = min(self.n_rows, self.target.limit)
        write_json(self.target.header, {**self.about, "rows": rows})


def _places(numbers: Array, limit: int, seed: int) -> Array:
    """The place of each row in the file; at or past the limit it is dropped.

    The first rows fill the file. Row i then takes a random place in 0 .. i and is saved if that
    place is in the file, so all rows have the same chance (Vitter's algorithm R).
    """
    counted = numbers.astype(np.uint64) + np.uint64(1)  # unsigned: products wrap around
    mixed = counted * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    random = (mixed % counted).astype(np.int64)
    return np.where(numbers < limit, numbers, random)


class SavedStates:
    """The rows of a finished file, or some of them; states are read from disk on demand."""

    def __init__(self, records: Array, chosen: Array, model: Mapping[str, Any]) -> None:
        """The rows `chosen` of a memory map; use `StateFile.open` to create one."""
        self._records, self._chosen = records, chosen
        self.model = dict(model)
        shape = records.dtype["states"].shape
        self.n_layers, self.d_model = shape[0] - 1, shape[1]

    def __len__(self) -> int:
        return len(self._chosen)

    def __repr__(self) -> str:
        shape = f"{self.n_layers + 1} x {self.d_model}"
        return f"SavedStates({len(self)} rows of {shape}, {self.model.get('name')})"

    @property
    def documents(self) -> Tensor:
        """The document of each row: (row,)."""
        return self._read("document", self._chosen)

    def states(self, which: Sequence[int] | Tensor | slice) -> Tensor:
        """Some rows at all layers: (row, n_layers + 1, d_model), float32."""
        index = which if isinstance(which, slice) else np.asarray(which)
        return self._read("states", self._chosen[index])

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        """h[layers[i]] of row rows[i], for each i: (cell, d_model), float32."""
        chosen = self._chosen[np.asarray(rows)]
        return self._read("states", (chosen, np.asarray(layers)))

    def _read(self, field: str, which: Any) -> Tensor:
        """A copy of some entries; pages of the file do not stay part of this process."""
        entries = torch.from_numpy(self._records[field][which])
        mapped = getattr(self._records, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)
        return entries

    def split(self, share: float, seed: int = 0) -> tuple["SavedStates", "SavedStates"]:
        """Two sets without a common document; the second has a random `share` of the documents."""
        if not 0 < share < 1:
            raise BadSettings(
                f"share {share} leaves one side without documents; expected a number between 0 and "
                "1, both excluded"
            )
        documents = self.documents.numpy()
        names = np.random.default_rng(seed).permutation(np.unique(documents))
        if len(names) < 2:
            raise BadSettings(
                f"rows of {len(names)} document cannot be split by document; give more documents"
            )
        n_second = min(max(1, round(share * len(names))), len(names) - 1)
        is_second = np.isin(documents, names[:n_second])
        first, second = self._chosen[~is_second], self._chosen[is_second]
        records, model = self._records, self.model
        return SavedStates(records, first, model), SavedStates(records, second, model)

    def fingerprint(self) -> str:
        """Hash of the selection: all documents, and the states of up to 128 rows."""
        digest = hashlib.sha256(self._chosen.astype("<i8").tobytes())
        digest.update(self._records["document"][self._chosen].tobytes())
        sample = np.linspace(0, len(self) - 1, min(len(self), 128)).round().astype(np.int64)
        digest.update(self._records["states"][self._chosen[sample]].tobytes())
        return digest.hexdigest()

    def check_model(self, transformer: Transformer) -> None:
        """Raise `WrongModel` unless the states come from exactly these weights."""
        transformer.refresh()
        if self.model.get("fingerprint") != transformer.identity.fingerprint:
            raise WrongModel(
                f"these states were saved from {self.model.get('name')} (weights "
                f"{str(self.model.get('fingerprint'))[:8]}), but the weights of "
                f"{transformer.identity.name} are {transformer.identity.fingerprint[:8]}; "
                "collect states from that model"
            )
