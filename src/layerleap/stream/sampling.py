"""How documents are cut into texts and positions chosen: plain values, checked without a model.

In: what a user asked for. Out: a `Sampling`, and the choice of positions among those allowed.

`OnePerText` follows the paper: one uniformly random position per text, so that rows are nearly
independent. `EveryNth` gives far more rows per forward pass, but they correlate within a text.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings
from layerleap.stream.split import Unit, check_per_document


@dataclass(frozen=True)
class OnePerText:
    """One uniformly random position; depends only on the seed and the text."""

    seed: int = 0

    def choose(self, allowed: Sequence[int], text: str) -> list[int]:
        """One of the allowed positions, or none if there are none."""
        if not allowed:
            return []
        key = hashlib.blake2b(f"{self.seed}:{text}".encode(), digest_size=8).digest()
        return [random.Random(int.from_bytes(key)).choice(allowed)]

    def __str__(self) -> str:
        return "one"


@dataclass(frozen=True)
class EveryNth:
    """Every n-th allowed position, starting with the first; n = 1 takes all."""

    n: int = 1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise BadSettings(f"positions 'every:{self.n}' are invalid; expected every:1 or more")

    def choose(self, allowed: Sequence[int], text: str) -> list[int]:
        """The chosen positions in order."""
        return list(allowed[:: self.n])

    def __str__(self) -> str:
        return "all" if self.n == 1 else f"every:{self.n}"


Positions = OnePerText | EveryNth


def parse_positions(text: str, seed: int = 0) -> Positions:
    """The choice of positions named "one", "all" or "every:N"."""
    if text == "one":
        return OnePerText(seed)
    if text == "all":
        return EveryNth(1)
    kind, _, number = text.partition(":")
    if kind == "every" and number.isdigit():
        return EveryNth(int(number))
    raise BadSettings(f"positions {text!r} are unknown; expected 'one', 'all' or 'every:N'")


@dataclass(frozen=True)
class Sampling:
    """How documents are cut into texts and positions chosen; plain values, written into cards."""

    unit: Unit = "sentence"
    max_tokens: int = 128  # longer texts are truncated
    positions: str = "one"  # "one", "all" or "every:N"
    per_document: int | None = 256  # at most this many texts per document; None for all
    held_out: float = 0.25  # share of documents that are never fitted on
    include_special: bool = False  # masked models: whether [CLS] and [SEP] may be masked and read
    seed: int = 0
    field: str = "text"  # the column or key that holds the text in records

    def __post_init__(self) -> None:
        check_fields(self)
        parse_positions(self.positions)
        if self.max_tokens < 1:
            raise BadSettings(f"max_tokens {self.max_tokens} is too small; expected 1 or more")
        check_per_document(self.per_document)
        if not 0 <= self.held_out < 1:
            raise BadSettings(f"held_out is {self.held_out}; expected at least 0 and below 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def read_shard(text: str) -> tuple[int, int]:
    """A part of the work as typed: "0/4" is the first of four."""
    which, _, of = text.partition("/")
    if not (which.isdigit() and of.isdigit()):
        raise BadSettings(f"shard is {text!r}; expected a form like 0/4")
    return check_shard((int(which), int(of)))


def check_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """The shard, if there is one of that number."""
    if not 0 <= shard[0] < shard[1]:
        raise BadSettings(f"shard {shard[0]} of {shard[1]} does not exist; count from 0")
    return shard
