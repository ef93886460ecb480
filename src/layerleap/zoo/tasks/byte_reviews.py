"""Film reviews as bytes: is the verdict good or bad, read letter by letter?

In: the bundled reviews. Out: a `Task` with 256 symbols, after the text task of the Long Range
Arena; reviews are cut much shorter, so that a small model learns something in minutes.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from layerleap.errors import BadSettings, BadText
from layerleap.zoo.reviews import is_held_out
from layerleap.zoo.tasks.task import Rows, Task

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
    sides = []
    for wanted, n in ((False, s.n_fitted), (True, s.n_held_out)):
        own = [record for record in records if is_held_out(record["text"]) == wanted][:n]
        if not own:
            raise BadText(f"{path} has no reviews to {'test' if wanted else 'train'} on")
        cut = [list(record["text"].encode("utf8", "replace")[-s.longest :]) for record in own]
        sides.append(Rows.of(cut, [int(record["label"]) for record in own]))
    return Task("byte-reviews", 2 + BYTES, 2, *sides)
