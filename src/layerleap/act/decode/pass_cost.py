"""How long a pass over several tokens takes on this machine.

In: a wrapped decoder. Out: `PassCost`, measured: blocks and head, over a cache.

Weights are read once for all tokens of a pass. For a single text reading them dominates, so a few
more tokens cost little. How little depends on machine and dtype, so it is measured.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from layerleap.errors import BadSettings
from layerleap.models.cursor.cursor import Cursor
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.tree import Tree
from layerleap.models.cursor.verify import find_axes
from layerleap.models.discovery.probe import probe_ids
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import longest_input

SIZES = (1, 2, 3, 4, 8, 16, 32)
CONTEXT = 64
REPEATS = 5
BUDGET = 2.0  # seconds, after which no repeat starts: the user is waiting for the next token


@dataclass(frozen=True)
class PassCost:
    """Seconds by number of tokens, interpolated linearly between sizes."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    packed: tuple[int, ...] = ()  # sizes that use packed weights
    context: int = 0  # tokens in the cache during measurement
    repeats: int = 1

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.sizes))
        if not self.sizes or len(self.sizes) != len(self.seconds) or not rising:
            raise BadSettings(
                f"sizes {self.sizes} do not fit {len(self.seconds)} seconds; expected ascending "
                "sizes, one value each"
            )
        if self.sizes[0] != 1 or not all(0 < value < math.inf for value in self.seconds):
            raise BadSettings(
                f"sizes {self.sizes} take {self.seconds} s; expected sizes from 1 on, and finite "
                "seconds above 0"
            )

    def of(self, tokens: int) -> float:
        """Seconds of a pass over this many tokens; extrapolated beyond the largest size."""
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

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "PassCost":
        """The inverse of `to_dict`; `BadSettings` for anything else."""
        try:
            return cls(
                tuple(map(int, found["sizes"])),
                tuple(map(float, found["seconds"])),
                tuple(map(int, found["packed"])),
                int(found["context"]),
                int(found["repeats"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadSettings(f"this is not the cost of passes: {error!r}") from error


def measure_passes(
    transformer: Transformer,
    packed: Packed | None = None,
    *,
    rowwise: bool = False,
    repeats: int = REPEATS,
) -> PassCost:
    """Measure the cost of passes. Decoders ask `kept_costs.cost_of_passes`, which remembers it.

    Sizes take turns, so that a slow moment affects all of them.

    Args:
        transformer: a decoder.
        packed: its weights, packed for passes over a few tokens.
        rowwise: each token attends as in a pass of its own.
        repeats: the fastest repeat counts: other load can only slow passes down, and it slows
            passes over many tokens more.
    """
    context = min(CONTEXT, longest_input(transformer) - SIZES[-1])
    if context < 1:
        raise BadSettings(
            f"this model takes at most {longest_input(transformer)} tokens, too few to measure "
            f"passes over {SIZES[-1]}"
        )
    ids = probe_ids(transformer.model, 1, context + SIZES[-1], seed=41)[0].tolist()
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    axes = find_axes(transformer)
    with torch.no_grad(), Cursor(transformer, axes, packed=packed, rowwise=rowwise) as cursor:
        cursor.run(ids[:context])
        first = time.perf_counter()
        for turn in range(repeats + 1):  # the first one warms up
            if turn > 1 and time.perf_counter() - first > BUDGET:
                break
            for size in SIZES:
                started = time.perf_counter()
                _wait(transformer.logits(cursor.run(Tree.chain(ids[context : context + size])).h))
                if turn:
                    seconds[size].append(time.perf_counter() - started)
                cursor.cut(context)
    best = tuple(min(values) for values in seconds.values())
    sizes = () if packed is None else packed.sizes
    return PassCost(SIZES, best, sizes, context, len(seconds[1]))


def _wait(result: torch.Tensor) -> None:
    """Wait until the device is done."""
    if result.device.type != "cpu":
        torch.accelerator.synchronize(result.device)
