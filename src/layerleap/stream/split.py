"""Documents, cut into the pieces that one forward pass sees; and the side each lies on.

In: a `Document`.
Out: its sentences or paragraphs in random order, or itself; and whether it is held out.
"""

import random
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Literal

from layerleap.errors import BadSettings
from layerleap.stream.documents import Document

Side = Literal["fit", "held-out", "both"]
UNITS = ("sentence", "paragraph", "document")
FEWEST_WORDS = 3  # a shorter sentence is a heading, a list's leftover or a wrong split

# An end mark, perhaps closing quotes or brackets, then space before the next word's first letter.
_END = re.compile(r"[.!?\u2026]+[\"')\]\u201d\u2019]*\s+(?=[\"'(\[\u201c\u2018]*(\S)(\w*))")
_ABBREVIATIONS = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "st", "gen", "col", "lt", "maj", "capt", "cmdr", "sgt"),
        *("rev", "hon", "sen", "rep", "gov", "pres", "messrs", "mt", "ft", "vs", "v", "cf", "e.g"),
        *("i.e", "ca", "c", "approx", "viz", "al", "ed", "eds", "trans", "op", "cit", "jan", "feb"),
        *("mar", "apr", "aug", "sept", "sep", "oct", "nov", "dec", "fr", "br", "bros", "dept"),
        *("brig", "adm", "cir", "supt", "insp", "pvt", "cpl"),
    )
)
_BEFORE_NUMBERS = frozenset(("no", "nos", "vol", "vols", "p", "pp", "fig", "figs", "art", "sec"))
# "the U.S. Army" goes on, "the U.S. The" does not.
_STARTERS = frozenset(
    (
        *("The", "A", "An", "In", "It", "He", "She", "They", "This", "These", "That", "On", "At"),
        *("But", "And", "As", "After", "For", "His", "Her", "Its", "However", "When", "While"),
    )
)


def iter_texts(
    document: Document, unit: str, *, per_document: int | None, seed: int
) -> Iterator[str]:
    """The document's pieces in random order, at most `per_document` of them.

    Any first few are thus a random sample, not the lead of an article. The order depends on the
    seed and the document's text alone, not on what was read before it.
    """
    if unit not in UNITS:
        raise BadSettings(f"unit {unit!r} is unknown; choose one of {', '.join(UNITS)}")
    if per_document is not None and per_document < 1:
        raise BadSettings(f"per_document is {per_document}; wanted at least 1, or None for all")
    pieces = _pieces(document.text, unit)
    random.Random(_number("order", str(seed), document.text)).shuffle(pieces)
    return iter(pieces[:per_document])


def is_held_out(document: Document, *, share: float, seed: int) -> bool:
    """Whether the document is kept for testing.

    Decided by its text alone: a moved file, another order or a copy of the document does not
    bring what was fitted on among what is read.
    """
    if not 0 <= share < 1:
        raise BadSettings(f"the held-out share is {share}; wanted at least 0 and below 1")
    return _number(str(seed), document.text) < share * 2**64


def _number(*parts: str) -> int:
    """A number below 2**64 that every machine gives for these strings."""
    # Surrogates can come in from escaped JSON and have no UTF-8 form of their own.
    data = "\0".join(parts).encode("utf8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def _pieces(text: str, unit: str) -> list[str]:
    if unit == "document":
        return [text] if text.strip() else []
    paragraphs = [p.strip() for p in re.split(r"\n[^\S\n]*\n", text) if p.strip()]
    if unit == "paragraph":
        return paragraphs
    sentences = (s for p in paragraphs for s in _sentences(" ".join(p.split())))
    return [s for s in sentences if len(s.split()) >= FEWEST_WORDS]


def _sentences(paragraph: str) -> Iterator[str]:
    begin = 0
    for mark in _END.finditer(paragraph):
        if _ends_sentence(paragraph[begin : mark.start()], mark):
            yield paragraph[begin : mark.end()].strip()
            begin = mark.end()
    yield paragraph[begin:].strip()


def _ends_sentence(before: str, mark: re.Match[str]) -> bool:
    first, rest = mark.group(1), mark.group(2)
    if not (first.isupper() or first.isdigit()):
        return False
    if not mark.group().rstrip().startswith(".") or mark.group().startswith(".."):
        return True
    word = (before.split() or [""])[-1].lstrip("\"'([\u201c\u2018")
    if word.lower() in _BEFORE_NUMBERS and first.isdigit():
        return False
    if re.fullmatch(r"[^\W\d_](\.[^\W\d_])+", word):  # U.S, e.g, a.m
        return first + rest in _STARTERS
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return not is_initial and word.lower() not in _ABBREVIATIONS
