"""Which positions of a text are read.

In: the positions that may be read. Out: those that will be.

`OnePerText` is the paper's way: one uniformly random position a text, so rows are nearly
independent. `EveryNth` gives far more rows per forward pass, correlated within a text.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from layerleap.errors import BadSettings


@dataclass(frozen=True)
class OnePerText:
    """One uniformly random position, drawn from the seed and the text alone."""

    seed: int = 0

    def choose(self, allowed: Sequence[int], text: str) -> list[int]:
        """At most one position; none if the text has none to offer."""
        if not allowed:
            return []
        key = hashlib.blake2b(f"{self.seed}:{text}".encode(), digest_size=8).digest()
        return [random.Random(int.from_bytes(key)).choice(allowed)]

    def __str__(self) -> str:
        return "one"


@dataclass(frozen=True)
class EveryNth:
    """Every n-th of the allowed positions, the first included; n = 1 is all of them."""

    n: int = 1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise BadSettings(f"every {self.n}-th position has no meaning; 1 or more was wanted")

    def choose(self, allowed: Sequence[int], text: str) -> list[int]:
        """The chosen positions in order."""
        return list(allowed[:: self.n])

    def __str__(self) -> str:
        return "all" if self.n == 1 else f"every:{self.n}"


Positions = OnePerText | EveryNth


def parse_positions(text: str, seed: int = 0) -> Positions:
    """`one`, `all` or `every:N`."""
    if text == "one":
        return OnePerText(seed)
    if text == "all":
        return EveryNth(1)
    kind, _, number = text.partition(":")
    if kind == "every" and number.isdigit():
        return EveryNth(int(number))
    raise BadSettings(f"positions {text!r} are unknown; 'one', 'all' or 'every:N' was wanted")
