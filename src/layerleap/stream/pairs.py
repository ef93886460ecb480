"""Pairs of texts for encoder-decoders: what the encoder reads, and what the decoder writes.

In: a .tsv file, a .jsonl file with two fields, (source, target) tuples, records (dictionaries), or
"titles": the beginnings of bundled Wikipedia articles with their titles.
Out: `Document`s with a target; a hash of the source text decides on which side a pair is.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from layerleap.errors import BadSettings, BadText
from layerleap.stream.documents import Document
from layerleap.stream.records import LINES_SUFFIXES, Record
from layerleap.zoo import fetch

TITLES = "titles"
ASK = "Write a title for this text: "  # in front of the beginning of an article
FIELDS = "source:target"  # names of the two fields of a record


def iter_pairs(source: Any, *, field: str = FIELDS) -> Iterator[Document]:
    """Each source text as a document with its target.

    Args:
        source: a .tsv file (source, tab, target on each line), a .jsonl file of records, an
            iterable of tuples or of records, or "titles".
        field: the two fields of a record, separated by a colon.
    """
    if not isinstance(source, str | Path):
        return _checked(_from_items(source, field), "the list of pairs")
    if source == TITLES:
        return _checked(_titles(fetch("wikipedia")), TITLES)
    path = Path(source).expanduser()
    if not path.is_file():
        raise BadText(
            f"there is no file {source}; an encoder-decoder reads pairs of texts from a .tsv or "
            ".jsonl file"
        )
    if path.suffix == ".tsv":
        return _checked(_from_tsv(path), str(source))
    if path.suffix in LINES_SUFFIXES:
        return _checked(_from_records(path, field), str(source))
    raise BadText(
        f"{source} is not a file of pairs; expected .tsv (source, tab, target) or .jsonl with the "
        f"fields {field}"
    )


def _titles(articles: Path) -> Iterator[tuple[str, str]]:
    """The first paragraph of each article, with a request for a title, and its title."""
    with articles.open(encoding="utf8") as lines:
        for line in lines:
            record = json.loads(line)
            yield ASK + record["text"].split("\n\n")[0], record["name"]


def _checked(pairs: Iterable[Any], label: str) -> Iterator[Document]:
    number = 0
    for number, pair in enumerate(pairs, start=1):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) and text.strip() for text in pair):
            raise BadText(
                f"item {number} of {label} is {pair!r:.60}; expected a source text and a target "
                "text, both not empty"
            )
        source, target = (text.strip() for text in pair)
        yield Document(f"pair#{number}", source, target)
    if not number:
        raise BadText(f"{label} contains no pair of texts")


def _from_tsv(path: Path) -> Iterator[Any]:
    try:
        with path.open(encoding="utf8", newline="") as lines:
            rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            yield from (row for row in rows if row)
    except (OSError, UnicodeDecodeError) as error:
        raise BadText(f"{path} cannot be read as text ({error})") from error


def _two_fields(field: str) -> tuple[str, str]:
    """The names of the source and of the target; the default of one text is the default of two."""
    first, colon, second = (FIELDS if field == "text" else field).partition(":")
    if not colon:
        raise BadSettings(f"field {field!r} names one field; expected two, as in {FIELDS!r}")
    return first, second


def _from_items(items: Iterable[Any], field: str) -> Iterator[Any]:
    for number, item in enumerate(items, start=1):
        if isinstance(item, Mapping):
            record = Record(dict(item), f"item {number}", f"pair#{number}")
            yield tuple(record[name] for name in _two_fields(field))
        else:
            yield item


def _from_records(path: Path, field: str) -> Iterator[Any]:
    first, second = _two_fields(field)
    try:
        with path.open(encoding="utf8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict) or not {first, second} <= record.keys():
                        raise BadText(
                            f"line {number} of {path} has no fields {first!r} and {second!r}; name "
                            "its fields with field='source:target'"
                        )
                    yield record[first], record[second]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadText(f"{path} cannot be read as lines of JSON ({error})") from error
