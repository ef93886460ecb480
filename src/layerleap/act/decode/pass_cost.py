"""How long a pass over several tokens takes here, compared with one over a single token.

In: a wrapped decoder. Out: `PassCost`, measured on this machine: blocks and head, over a cache.

Weights are read once for all tokens of a pass. Where reading them is what takes the time, as for
one text at a time, a few more tokens cost little; how little differs by machine and dtype, so it
is measured and never assumed.
"""

import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from layerleap.errors import BadSettings
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.verify import find_axes
from layerleap.models.discovery.probe import probe_ids
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import longest_input

SIZES = (1, 2, 3, 4, 8, 16, 32)
CONTEXT = 64
REPEATS = 5
BUDGET = 8.0  # seconds, after which fewer repeats have to do: somebody waits for a first word


@dataclass(frozen=True)
class PassCost:
    """Seconds by number of tokens; sizes in between lie on straight lines."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    packed: tuple[int, ...] = ()  # sizes for which weights were laid out
    context: int = 0  # tokens in the cache while measuring
    repeats: int = 1

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.sizes))
        if not self.sizes or len(self.sizes) != len(self.seconds) or not rising:
            raise BadSettings(f"sizes {self.sizes} are not rising, or lack their seconds")
        if self.sizes[0] != 1 or not all(value > 0 for value in self.seconds):
            raise BadSettings("the cost of one token, and seconds above 0, were wanted")

    def of(self, tokens: int) -> float:
        """Seconds of a pass over so many tokens; beyond the largest size as if by its slope."""
        points = list(zip(self.sizes, self.seconds, strict=True))
        if len(points) == 1:
            return self.seconds[0] * tokens
        for (a, low), (b, high) in pairwise(points):
            if tokens <= b or b == self.sizes[-1]:
                return max(low, low + (high - low) * (tokens - a) / (b - a))
        raise AssertionError("unreachable")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


_MEASURED: "WeakKeyDictionary[Transformer, dict[bool, PassCost]]" = WeakKeyDictionary()


def measure_passes(
    transformer: Transformer, packed: Packed | None = None, *, repeats: int = REPEATS
) -> PassCost:
    """Measure once per model; sizes take turns, so that a slow moment hits all of them.

    Args:
        transformer: a decoder.
        packed: its weights, laid out for passes over a few tokens.
        repeats: of which the quickest counts: whatever else runs can only make them slower, and
            it does so more to passes over many tokens.
    """
    known = _MEASURED.setdefault(transformer, {})
    has_copies = packed is not None
    if has_copies not in known:
        known[has_copies] = _measure(transformer, packed, repeats)
    return known[has_copies]


@torch.no_grad()
def _measure(transformer: Transformer, packed: Packed | None, repeats: int) -> PassCost:
    context = min(CONTEXT, longest_input(transformer) - SIZES[-1])
    if context < 1:
        raise BadSettings(
            f"this model reads at most {longest_input(transformer)} tokens; too few to measure "
            f"passes of {SIZES[-1]}"
        )
    ids = probe_ids(transformer.model, 1, context + SIZES[-1], seed=41)[0].tolist()
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    begun = time.perf_counter()
    for turn in range(repeats + 1):  # the first one warms up
        if turn > 1 and time.perf_counter() - begun > BUDGET:
            break
        with Cursor(transformer, find_axes(transformer), packed=packed) as walk:
            walk.run(ids[:context])
            for size in SIZES:
                started = time.perf_counter()
                _wait(transformer.logits(walk.run(ids[context : context + size]).h))
                if turn:
                    seconds[size].append(time.perf_counter() - started)
                walk.cut(context)
    best = tuple(min(values) for values in seconds.values())
    sizes = () if packed is None else packed.sizes
    return PassCost(SIZES, best, sizes, context, len(seconds[1]))


def _wait(made: torch.Tensor) -> None:
    """Until the device has done what it was told."""
    if made.device.type != "cpu":
        torch.accelerator.synchronize(made.device)
