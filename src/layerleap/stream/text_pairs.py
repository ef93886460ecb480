"""Pairs of texts for encoder-decoders: what the encoder reads, and what the decoder writes.

In: a .tsv file, a .jsonl file with two fields, (source, target) tuples, records (dictionaries), or
"titles": the beginnings of bundled Wikipedia articles with their titles.
Out: `Document`s with a target; a hash of the source text decides on which side a pair is.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from layerleap.errors import BadSettings, BadText
from layerleap.stream.documents import Document, iter_documents
from layerleap.stream.records import LINES_SUFFIXES, Record, decoded, kind_of, opened, records_of

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
        articles = iter_documents("wikipedia")
        beginnings = ((ASK + a.text.split("\n\n")[0], a.name) for a in articles)
        return _checked(beginnings, TITLES)
    path = Path(source).expanduser()
    if not path.is_file():
        raise BadText(
            f"there is no file {source}; an encoder-decoder reads pairs of texts from a .tsv or "
            ".jsonl file"
        )
    if kind_of(path) not in (".tsv", *LINES_SUFFIXES):
        raise BadText(
            f"{source} is not a file of pairs; expected .tsv (source, tab, target) or .jsonl with "
            f"the fields {field}"
        )
    return _checked(_from_file(path, field), str(source))


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


def _from_file(path: Path, field: str) -> Iterator[Any]:
    with opened(path) as stream:
        if kind_of(path) == ".tsv":
            lines = decoded(stream, str(path), newline="")
            rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            yield from (row for row in rows if row)
        else:
            yield from _from_items(records_of(stream, path, path.name), field)


def _from_items(items: Iterable[Any], field: str) -> Iterator[Any]:
    for number, item in enumerate(items, start=1):
        if isinstance(item, Mapping):
            item = Record(dict(item), f"item {number}", f"pair#{number}")
        yield tuple(item[name] for name in _names(field)) if isinstance(item, Record) else item


def _names(field: str) -> tuple[str, str]:
    """The names of the source and of the target; the default of one text is the default of two."""
    first, colon, second = (FIELDS if field == "text" else field).partition(":")
    if not colon:
        raise BadSettings(f"field {field!r} names one field; expected two, as in {FIELDS!r}")
    return first, second
