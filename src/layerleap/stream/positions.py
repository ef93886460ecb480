"""The choice of positions to read in a text.

In: the positions that may be read. Out: those that will be.

`OnePerText` follows the paper: one uniformly random position per text, so that rows are nearly
independent. `EveryNth` gives far more rows per forward pass, but they correlate within a text.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from layerleap.errors import BadSettings


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
