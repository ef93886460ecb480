"""Any source of text as a stream of named documents.

In: a bundled name, a file, a folder, "-", the name of a data set, or any iterable of strings or of
records (dictionaries), such as a `datasets.Dataset` or `IterableDataset`.
Out: `Document`s, one at a time, so that only one is in memory.
A plain text file has no documents of its own: each paragraph (or line, if there are no blank
lines) counts as one, so the file ends up on both sides of the split into fitting and testing.
Where that matters, use .jsonl or .parquet with one record per document, or a folder of files.
Not here: cutting documents into texts and splitting them into two sides (`split.py`).
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any

from layerleap.errors import BadText, did_you_mean
from layerleap.files import files_under
from layerleap.stream.records import (
    LINES_SUFFIXES,
    Record,
    clear_read_errors,
    decoded,
    kind_of,
    may_be_hub_name,
    opened,
    records_of,
    records_of_hub,
)
from layerleap.zoo.catalog import TEXT_NAMES
from layerleap.zoo.download import fetch

FOLDER_SUFFIXES = (".txt", ".md", ".parquet", *LINES_SUFFIXES)
LOOKAHEAD = 64 * 1024  # characters that are searched for a blank line


@dataclass(frozen=True)
class Document:
    """An article or a record of a file; the unit in which text is split for fitting and testing."""

    name: str  # unique within its source, and the same each time it is read
    text: str
    target: str = ""  # what a decoder writes for this text, if it is one of a pair


def iter_documents(
    source: str | Path | Iterable[str | Mapping[str, Any]], *, field: str = "text"
) -> Iterator[Document]:
    """The documents of `source`; a missing file or folder is an error right away.

    Args:
        source: "wikipedia", "news" or "enwik8"; a .txt, .md, .jsonl or .parquet file (or .gz of
            one); a folder of them; "-" for standard input; a data set as "org/name:config:split";
            or an iterable of strings or of records. Paragraphs of a plain text file count as
            documents; a record is one document. A bundled name wins over a file of that name:
            write ./news for the file. An iterator is used up by the first pass over it.
        field: the column or key with the text in records.
    """
    if not isinstance(source, str | Path):
        _require_items(source)
        once = " (which can be read only once)" if isinstance(source, Iterator) else ""
        return _not_empty(_from_items(source, field), f"the {type(source).__name__}{once}")
    label = str(source)
    if label == "-":
        return _not_empty(_from_plain(sys.stdin.buffer, "stdin"), "standard input")
    if label in TEXT_NAMES and isinstance(source, str):
        return _from_bundled(fetch(label))
    path = Path(label).expanduser()
    if path.is_dir():
        files = files_under(path, lambda file: kind_of(file) in FOLDER_SUFFIXES)
        if not files:
            suffixes = ", ".join(FOLDER_SUFFIXES)
            raise BadText(f"the folder {path} contains no text file; expected {suffixes} or .gz")
        # Named relative to the folder, so that a moved folder is split the same way.
        inside = (_from_file(file, file.relative_to(path).as_posix(), field) for file in files)
        return _not_empty(chain.from_iterable(inside), label)
    if path.exists():
        return _not_empty(_from_file(path, label, field), label)
    if isinstance(source, Path) or not may_be_hub_name(label):
        names = ", ".join(TEXT_NAMES)
        raise BadText(
            f"there is no file or folder {label}; bundled texts are {names}"
            f"{did_you_mean(label, TEXT_NAMES)}"
        )
    documents = (_from_record(record, field) for record in records_of_hub(label))
    return _not_empty(chain.from_iterable(documents), label)


def _not_empty(documents: Iterator[Document], label: str) -> Iterator[Document]:
    is_empty = True
    for document in documents:
        is_empty = False
        yield document
    if is_empty:
        raise BadText(f"{label} contains no text; expected at least one non-empty document")


def _require_items(source: object) -> None:
    """Refuse what does not give strings or records one by one."""
    kind = type(source).__name__
    if isinstance(source, Mapping):
        names = ", ".join(map(repr, source))
        raise BadText(
            f"a text cannot be read from a {kind} as a whole; choose one of its parts ({names})"
        )
    if hasattr(source, "columns"):  # the names of its columns are not a text
        raise BadText(
            f"a {kind} is read column by column; give the column of the text, or its rows as "
            "dictionaries: frame.to_dict('records')"
        )
    if not isinstance(source, Iterable):
        raise BadText(
            f"a text cannot be read from a {kind}; expected a name, a file, a folder, or an "
            "iterable of strings or dictionaries"
        )


def _from_items(items: Iterable[Any], field: str) -> Iterator[Document]:
    for number, item in enumerate(items, start=1):
        name = f"text#{number}"
        if isinstance(item, Mapping):
            yield from _from_record(Record(dict(item), f"item {number}", name), field)
        elif not isinstance(item, str):
            raise BadText(
                f"item {number} has type {type(item).__name__}; expected a string or a dictionary"
            )
        elif item.strip():
            yield Document(name, item.strip())


def _from_bundled(path: Path) -> Iterator[Document]:
    with path.open(encoding="utf8") as lines:
        for line in lines:
            record = json.loads(line)
            yield Document(record["name"], record["text"])


def _from_file(path: Path, label: str, field: str) -> Iterator[Document]:
    with opened(path) as stream:
        if kind_of(path) in (".parquet", *LINES_SUFFIXES):
            for record in records_of(stream, path, label, (field, "name", "title")):
                yield from _from_record(record, field)
        else:
            yield from _from_plain(stream, label)


def _from_plain(stream: IO[bytes], label: str) -> Iterator[Document]:
    """Paragraphs if there are blank lines, otherwise lines."""
    with clear_read_errors(label):
        lines = decoded(stream, label)
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


def _from_record(record: Record, field: str) -> Iterator[Document]:
    """At most one document: a record whose text is empty or null is left out."""
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise BadText(
            f"{record.where}: {field!r} has type {type(text).__name__}; expected a string"
        )
    if text and text.strip():
        title = record.fields.get("name") or record.fields.get("title")
        # Titles may repeat, so the location stays in the name.
        name = f"{title} [{record.name}]" if isinstance(title, str) else record.name
        yield Document(name, text.strip())
