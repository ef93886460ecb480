"""Documents split into texts for a forward pass, and into a fitting and a held-out side.

In: a `Document`.
Out: its sentences or paragraphs in random order, or the whole; and whether it is held out.
"""

import random
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Literal

from layerleap.errors import BadSettings, check_choice
from layerleap.stream.documents import Document
from layerleap.zoo.reviews import is_held_out as is_text_held_out

Side = Literal["fit", "held-out", "both"]
Unit = Literal["sentence", "paragraph", "document"]
FEWEST_WORDS = 3  # a shorter sentence is a heading, a rest of a list or a wrong split

# An end mark, optional closing quotes or brackets, then space before the next word.
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
# "the U.S. Army" continues the sentence, "the U.S. The" does not.
_STARTERS = frozenset(
    (
        *("The", "A", "An", "In", "It", "He", "She", "They", "This", "These", "That", "On", "At"),
        *("But", "And", "As", "After", "For", "His", "Her", "Its", "However", "When", "While"),
    )
)


def iter_texts(
    document: Document, unit: str, *, per_document: int | None, seed: int
) -> Iterator[str]:
    """The document's texts in random order, at most `per_document` of them.

    The first few are thus a random sample, not the lead of an article. The order depends only on
    the seed and the document's text, not on other documents.
    """
    check_choice(unit, Unit, "unit")
    check_per_document(per_document)
    texts = _texts(document.text, unit)
    random.Random(_hash("order", str(seed), document.text)).shuffle(texts)
    return iter(texts[:per_document])


def check_per_document(n: int | None) -> None:
    """Refuse a limit that leaves no text."""
    if n is not None and n < 1:
        raise BadSettings(f"per_document is {n}; expected at least 1, or None for all")


def is_held_out(document: Document, *, share: float, seed: int) -> bool:
    """True if the document is kept for testing.

    Depends only on the seed and its text, so moving a file, reordering documents or copying one
    never puts text that was fitted on into the held-out side.
    """
    if not 0 <= share < 1:
        raise BadSettings(f"the held-out share is {share}; expected at least 0 and below 1")
    return is_text_held_out(document.text, share, seed)


def on_side(side: Side, held_out: bool) -> bool:
    """True if something that is held out or not belongs to `side`."""
    return side == "both" or held_out == (side == "held-out")


def fingerprint(content: str | bytes) -> int:
    """A number below 2**64 that recognises a document; the same on every machine."""
    data = content.encode("utf8", "surrogatepass") if isinstance(content, str) else content
    return int.from_bytes(blake2b(data, digest_size=8, person=b"document").digest(), "big")


def pack_fingerprints(marks: Iterable[int]) -> str:
    """Fingerprints as text for JSON, eight bytes each."""
    return b64encode(b"".join(mark.to_bytes(8, "big") for mark in sorted(marks))).decode()


def unpack_fingerprints(packed: str) -> frozenset[int]:
    """The inverse of `pack_fingerprints`."""
    data = b64decode(packed, validate=True)
    return frozenset(int.from_bytes(data[i : i + 8], "big") for i in range(0, len(data), 8))


def _hash(*parts: str) -> int:
    """A number below 2**64 that is the same for these strings on every machine."""
    # Lone surrogates come from escaped JSON and have no UTF-8 form.
    data = "\0".join(parts).encode("utf8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def _texts(text: str, unit: str) -> list[str]:
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
