"""Any source of text as a stream of named documents.

In: a bundled name, a file, a folder, "-", the name of a data set, or an iterable of strings.
Out: `Document`s, one at a time, so that only one is in memory.
A plain text file has no documents of its own: each paragraph (or line, if there are no blank
lines) counts as one, so the file ends up on both sides of the split into fitting and testing.
Where that matters, use .jsonl or .parquet with one record per document, or a folder of files.
Not here: cutting documents into texts and splitting them into two sides (`split.py`).
"""

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any

from layerleap.errors import BadText, CannotFetch, first_line
from layerleap.extras import library
from layerleap.files import files_under
from layerleap.zoo.catalog import TEXT_NAMES
from layerleap.zoo.download import fetch

LINES_SUFFIXES = (".jsonl", ".ndjson", ".json-lines", ".jsonlines", ".json")
FOLDER_SUFFIXES = (".txt", ".md", ".parquet", *LINES_SUFFIXES)
LOOKAHEAD = 64 * 1024  # characters that are searched for a blank line
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.+-]*){0,2}")


@dataclass(frozen=True)
class Document:
    """An article or a record of a file; the unit in which text is split for fitting and testing."""

    name: str  # unique within its source, and the same each time it is read
    text: str
    target: str = ""  # what a decoder writes for this text, if it is one of a pair


def iter_documents(
    source: str | Path | Iterable[str], *, field: str = "text"
) -> Iterator[Document]:
    """The documents of `source`; a missing file or folder is an error right away.

    Args:
        source: "wikipedia", "news" or "enwik8"; a .txt, .md, .jsonl or .parquet file (or .gz of
            one); a folder of them; "-" for standard input; a data set as "org/name:config:split";
            or strings. Paragraphs of a plain text file count as documents; a record is one
            document. A bundled name wins over a file of that name: write ./news for the file.
        field: the column or key with the text in records.
    """
    if isinstance(source, Mapping) or not isinstance(source, str | Path | Iterable):
        raise BadText(
            f"a text cannot be read from a {type(source).__name__}; expected a name, a file, a "
            "folder or a list of strings"
        )
    if not isinstance(source, str | Path):
        return _not_empty(_from_strings(source), "the list of strings")
    label = str(source)
    if label == "-":
        return _not_empty(_from_plain(sys.stdin.buffer, "stdin"), "standard input")
    if label in TEXT_NAMES and isinstance(source, str):
        return _from_bundled(fetch(label))
    path = Path(label).expanduser()
    if path.is_dir():
        return _not_empty(_from_files(_files_under(path), path, field), label)
    if path.exists():
        return _not_empty(_from_file(path, label, field), label)
    if isinstance(source, Path) or not _may_be_hub_name(label):
        names = ", ".join(TEXT_NAMES)
        raise BadText(f"there is no file or folder {label}; bundled texts are {names}")
    return _not_empty(_from_hub(label, field), label)


def _not_empty(documents: Iterator[Document], label: str) -> Iterator[Document]:
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise BadText(f"{label} contains no text; expected at least one non-empty document")


def _from_strings(strings: Iterable[str]) -> Iterator[Document]:
    for number, text in enumerate(strings, start=1):
        if not isinstance(text, str):
            raise BadText(f"item {number} has type {type(text).__name__}; expected a string")
        if text.strip():
            yield Document(f"text#{number}", text.strip())


def _from_bundled(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf8") as lines:
        for line in lines:
            record = json.loads(line)
            yield Document(record["name"], record["text"])


def _files_under(folder: Path) -> list[Path]:
    files = files_under(folder, lambda path: _kind(path) in FOLDER_SUFFIXES)
    if not files:
        suffixes = ", ".join(FOLDER_SUFFIXES)
        raise BadText(f"the folder {folder} contains no text file; expected {suffixes} or .gz")
    return files


def _from_files(files: list[Path], folder: Path, field: str) -> Iterator[Document]:
    for path in files:
        # Named relative to the folder, so that a moved folder is split the same way.
        yield from _from_file(path, path.relative_to(folder).as_posix(), field)


def _kind(path: Path) -> str:
    """The suffix of the format: ".jsonl" for both x.jsonl and x.jsonl.gz."""
    suffix = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if suffix == ".gz" else suffix


def _from_file(path: Path, label: str, field: str) -> Iterator[Document]:
    with _clear_read_errors(str(path)), ExitStack() as stack:
        stream: IO[bytes] = stack.enter_context(path.open("rb"))
        if path.suffix.lower() == ".gz":
            zipped: Any = gzip.GzipFile(fileobj=stream)
            stream = stack.enter_context(zipped)
        kind = _kind(path)
        if kind == ".parquet":
            yield from _from_parquet(stream, path, label, field)
        elif kind in LINES_SUFFIXES:
            yield from _from_json_lines(stream, path, label, field)
        else:
            yield from _from_plain(stream, label)


@contextmanager
def _clear_read_errors(label: str) -> Iterator[None]:
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


def _decoded(stream: IO[bytes], label: str) -> Iterator[str]:
    """Lines of UTF-8 text; a file with zero bytes is rejected."""
    wrapper = io.TextIOWrapper(stream, encoding="utf-8-sig")
    try:
        for line in wrapper:
            if "\0" in line:
                raise BadText(f"{label} looks like a binary file; expected UTF-8 text")
            yield line
    finally:
        wrapper.detach()  # the caller closes the stream


def _from_plain(stream: IO[bytes], label: str) -> Iterator[Document]:
    """Paragraphs if there are blank lines, otherwise lines."""
    with _clear_read_errors(label):
        lines = _decoded(stream, label)
        head, size = [], 0
        while size < LOOKAHEAD and (line := next(lines, None)) is not None:
            head.append(line)
            size += len(line)
        has_blank = "\n\n" in re.sub(r"\n\s*\n", "\n\n", "".join(head).strip())
        all_lines = chain(head, lines)
        texts = _paragraphs(all_lines) if has_blank else (line.strip() for line in all_lines)
        for number, text in enumerate(filter(None, texts), start=1):
            yield Document(f"{label}#{number}", text)


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    for is_blank, group in groupby(lines, key=lambda line: not line.strip()):
        if not is_blank:
            yield "".join(group).strip()


def _from_json_lines(stream: IO[bytes], path: Path, label: str, field: str) -> Iterator[Document]:
    for number, line in enumerate(_decoded(stream, str(path)), start=1):
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
        yield from _from_record(record, field, where, f"{label}#{number}")


def _from_record(record: dict[str, Any], field: str, where: str, name: str) -> Iterator[Document]:
    """At most one document: a record whose text is empty or null is left out."""
    if field not in record:
        fields = ", ".join(map(str, record)) or "no fields"
        raise BadText(
            f"{where} has no field {field!r}; it has {fields}: choose one of them (--field)"
        )
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise BadText(f"{where}: {field!r} has type {type(text).__name__}; expected a string")
    if text and text.strip():
        title = record.get("name") or record.get("title")
        # Titles may repeat, so the location stays in the name.
        yield Document(f"{title} [{name}]" if isinstance(title, str) else name, text.strip())


def _from_parquet(stream: IO[bytes], path: Path, label: str, field: str) -> Iterator[Document]:
    why = f"reading {path} needs it"
    arrow, parquet = (library(name, "data", why) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        file = parquet.ParquetFile(stream)
        names = file.schema_arrow.names
        columns = [c for c in dict.fromkeys((field, "name", "title")) if c in names]
        if field not in names:
            raise BadText(
                f"{path} has no field {field!r}; it has {', '.join(names)}: choose one (--field)"
            )
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for record in batch.to_pylist():
                number += 1
                where = f"row {number} of {path}"
                yield from _from_record(record, field, where, f"{label}#{number}")
    except arrow.ArrowException as error:
        raise BadText(f"{path} is not a readable parquet file ({first_line(error)})") from error


def _may_be_hub_name(label: str) -> bool:
    looks_like_file = Path(label).suffix.lower() in (*FOLDER_SUFFIXES, ".gz")
    return bool(HUB_NAME.fullmatch(label)) and not looks_like_file and label[0] not in "./"


def _from_hub(label: str, field: str) -> Iterator[Document]:
    from huggingface_hub import HfApi

    unknown = f"{label!r} is neither a file nor one of {', '.join(TEXT_NAMES)}"
    datasets = library("datasets", "data", f"{unknown}: reading it as a data set needs it")
    name, config, split = (*label.split(":"), "", "")[:3]
    try:
        # Checked first, because without a network load_dataset retries noisily for half a minute.
        HfApi().dataset_info(name, timeout=10)
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows, start=1):
            place = f"{label}#{number}"
            yield from _from_record(row, field, f"row {number} of {label}", place)
    except BadText:
        raise
    except Exception as error:  # the library raises whatever its many back ends raise
        raise CannotFetch(
            f"{unknown}, and it could not be loaded as a data set ({type(error).__name__}: "
            f"{first_line(error)}); check the spelling and the network"
        ) from error
