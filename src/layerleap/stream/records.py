"""Records of a file or of a data set of the hub, one at a time.

In: a .jsonl, .csv, .tsv or .parquet file (or .gz of one), or the name of a data set.
Out: `Record`s: fields by name, and where each was found, for errors.
"""

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from layerleap.errors import BadText, CannotFetch, did_you_mean, first_line
from layerleap.extras import library, need
from layerleap.zoo.catalog import TEXT_NAMES

LINES_SUFFIXES = (".jsonl", ".ndjson", ".json-lines", ".jsonlines", ".json")
TABLE_SUFFIXES = {".csv": ",", ".tsv": "\t"}
RECORD_SUFFIXES = (".parquet", *LINES_SUFFIXES, *TABLE_SUFFIXES)
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+-]*){0,2}")


@dataclass(frozen=True)
class Record:
    """One record: its fields, and where it is."""

    fields: dict[str, Any]
    where: str  # for errors: "line 3 of data.jsonl"
    name: str  # unique within its source: "data.jsonl#3"

    def __getitem__(self, field: str) -> Any:
        """The value of a field; an error that lists the fields if there is none of that name."""
        if field not in self.fields:
            fields = ", ".join(map(str, self.fields)) or "no fields"
            raise BadText(
                f"{self.where} has no field {field!r}; it has {fields}: choose one of them "
                "(--field, or field=... in a sampling)"
            )
        return self.fields[field]


def kind_of(path: Path) -> str:
    """The suffix of the format: ".jsonl" for both x.jsonl and x.jsonl.gz."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix == ".gz" else suffix


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, unzipped if need be; what cannot be read is an error in one line."""
    with clear_read_errors(str(path)), ExitStack() as stack:
        stream: IO[bytes] = stack.enter_context(path.open("rb"))
        if path.suffix.lower() == ".gz":
            zipped: Any = gzip.GzipFile(fileobj=stream)
            stream = stack.enter_context(zipped)
        yield stream


@contextmanager
def clear_read_errors(label: str) -> Iterator[None]:
    """Turn errors of reading and decoding into one `BadText`."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise BadText(
            f"{label} is not UTF-8 text (it contains the byte 0x{byte:02x}); save it as UTF-8"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadText(f"{label} cannot be read ({reason}); check the file") from error


def decoded(stream: IO[bytes], label: str, newline: str | None = None) -> Iterator[str]:
    """Lines of UTF-8 text; a file with zero bytes is rejected."""
    wrapper = io.TextIOWrapper(stream, encoding="utf-8-sig", newline=newline)
    try:
        for line in wrapper:
            if "\0" in line:
                raise BadText(f"{label} looks like a binary file; expected UTF-8 text")
            yield line
    finally:
        if not stream.closed:  # else the reader stopped early, and nothing is left to do
            wrapper.detach()  # the caller closes the stream


def records_of(
    stream: IO[bytes], path: Path, label: str, columns: Sequence[str] = ()
) -> Iterator[Record]:
    """The records of an open file.

    Args:
        stream: its content.
        path: its format, and its name in errors.
        label: how names of records begin.
        columns: those to read of a .parquet file, of which the first must be there; all when empty.
    """
    kind = kind_of(path)
    if kind == ".parquet":
        return _from_parquet(stream, path, label, columns)
    if kind in TABLE_SUFFIXES:
        return _from_table(stream, path, label, TABLE_SUFFIXES[kind])
    return _from_json_lines(stream, path, label)


def _from_json_lines(stream: IO[bytes], path: Path, label: str) -> Iterator[Record]:
    for number, line in enumerate(decoded(stream, str(path)), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadText(
                f"{where} is not valid JSON ({error}); expected one object per line"
            ) from error
        if not isinstance(record, dict):
            raise BadText(f"{where} is not a JSON object; expected one object per line")
        yield Record(record, where, f"{label}#{number}")


def _from_table(stream: IO[bytes], path: Path, label: str, delimiter: str) -> Iterator[Record]:
    rows = csv.reader(decoded(stream, str(path), newline=""), delimiter=delimiter)
    try:
        names = next(rows, [])
        if twice := [name for name, times in Counter(names).items() if times > 1 and name]:
            raise BadText(
                f"{path} has two columns of the name {twice[0]!r}; expected each name once: rename "
                "one"
            )
        for number, row in enumerate(rows, start=2):
            if len(row) not in (0, len(names)):
                raise BadText(
                    f"row {number} of {path} has {len(row)} fields; expected the {len(names)} of "
                    f"its first row ({', '.join(names)})"
                )
            if row:
                fields = dict(zip(names, row, strict=True))
                yield Record(fields, f"row {number} of {path}", f"{label}#{number}")
    except csv.Error as error:
        raise BadText(f"{path} is not a readable table ({error})") from error


def _from_parquet(
    stream: IO[bytes], path: Path, label: str, columns: Sequence[str]
) -> Iterator[Record]:
    why = f"reading {path} needs it"
    arrow, parquet = (library(name, "data", why) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        file = parquet.ParquetFile(stream)
        names = file.schema_arrow.names
        if columns and columns[0] not in names:
            raise BadText(
                f"{path} has no field {columns[0]!r}; it has {', '.join(names)}: choose one "
                "(--field)"
            )
        columns = [c for c in dict.fromkeys(columns or names) if c in names]
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for fields in batch.to_pylist():
                number += 1
                yield Record(fields, f"row {number} of {path}", f"{label}#{number}")
    except arrow.ArrowException as error:
        raise BadText(f"{path} is not a readable parquet file ({first_line(error)})") from error


def may_be_hub_name(label: str) -> bool:
    """Whether this could be "org/name:config:split" rather than a mistyped file."""
    suffixes = (".txt", ".md", ".gz", *RECORD_SUFFIXES)
    looks_like_file = Path(label).suffix.lower() in suffixes
    return bool(HUB_NAME.fullmatch(label)) and not looks_like_file and label[0] not in "./"


def records_of_hub(label: str, known: Sequence[str] = TEXT_NAMES) -> Iterator[Record]:
    """The records of a data set of the hub, streamed.

    Args:
        label: "org/name:config:split"; configuration and split may be left out.
        known: bundled names, listed if this is neither.
    """
    # Checked first, because without a network load_dataset retries noisily for half a minute.
    check_data_set(label, known)
    datasets = library("datasets", "data")
    name, config, split = (*label.split(":"), "", "")[:3]
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield Record(dict(row), f"row {number} of {label}", f"{label}#{number}")
    except (BadText, GeneratorExit):
        raise
    except Exception as error:  # the library raises whatever its many back ends raise
        raise _no_data_set(label, known, error) from error


def check_data_set(label: str, known: Sequence[str] = TEXT_NAMES) -> None:
    """Refuse a data set that the hub does not have, and one that no library here can read."""
    from huggingface_hub import HfApi

    need("datasets", "data", f"{_unknown(label, known)}: reading it as a data set needs it")
    try:
        HfApi().dataset_info(label.partition(":")[0], timeout=10)
    except Exception as error:  # no network, no such data set, no access, or an invalid name
        raise _no_data_set(label, known, error) from error


def _unknown(label: str, known: Sequence[str]) -> str:
    return f"{label!r} is neither a file nor one of {', '.join(known)}"


def _no_data_set(label: str, known: Sequence[str], error: Exception) -> CannotFetch:
    return CannotFetch(
        f"{_unknown(label, known)}, and it could not be loaded as a data set "
        f"({type(error).__name__}: {first_line(error)}); check the spelling and the network"
        f"{did_you_mean(label, known)}"
    )
