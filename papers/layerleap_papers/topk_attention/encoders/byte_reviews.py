"""Film reviews as bytes: is the verdict good or bad, read letter by letter?

In: the bundled reviews. Out: a `Task` with 256 symbols, after the text task of the Long Range
Arena. Only the end of a review is kept, so that a small model learns something in minutes.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from layerleap.errors import BadSettings, BadText
from layerleap.zoo import is_held_out
from layerleap_papers.topk_attention.encoders.task import Rows, Task

BYTES = 256


@dataclass(frozen=True)
class ByteReviewSettings:
    """Sizes of the task; plain values, which become part of every result."""

    n_fitted: int = 8000
    n_held_out: int = 1000
    longest: int = 128  # bytes at the end of a review, where its verdict often is
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_fitted", "n_held_out", "longest"):
            if (value := getattr(self, name)) < 1:
                raise BadSettings(f"{name} is {value}; expected 1 or more")


def byte_reviews(path: Path, settings: ByteReviewSettings | None = None) -> Task:
    """The task from a .jsonl file of reviews with their labels.

    Reviews are held out by the same rule as for all models that are trained on them.
    """
    s = settings or ByteReviewSettings()
    with path.open(encoding="utf8") as lines:
        records = [json.loads(line) for line in lines]
    random.Random(s.seed).shuffle(records)  # the file has one source after the other
    sides, known = [], set[bytes]()
    for wanted, n in ((False, s.n_fitted), (True, s.n_held_out)):
        ends: dict[bytes, int] = {}  # different reviews may have the same end; each counts once
        for record in records:
            end = record["text"].encode("utf8", "replace")[-s.longest :]
            if is_held_out(record["text"]) == wanted and end not in known and len(ends) < n:
                ends.setdefault(end, int(record["label"]))
        if not ends:
            raise BadText(f"{path} has no reviews to {'test' if wanted else 'train'} on")
        known |= ends.keys()
        sides.append(Rows.of([list(end) for end in ends], list(ends.values())))
    return Task("byte-reviews", 2 + BYTES, 2, *sides)
