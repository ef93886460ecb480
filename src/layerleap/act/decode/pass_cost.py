"""How long a pass over several tokens takes on this machine: measured once, then kept.

In: a wrapped decoder. Out: its `PassCost`, measured now or earlier under the same circumstances.

Weights are read once for all tokens of a pass. For a single text reading them dominates, so a few
more tokens cost little. How little depends on machine and dtype, so it is measured. Costs decide
how many drafts are tried and nothing else: a wrong file in the cache can make decoding slower, but
never changes a token.
"""

import hashlib
import json
import math
import os
import platform
import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

import layerleap
from layerleap.errors import BadArtifact, BadSettings, CannotWrite
from layerleap.files import cache_root, read_json, write_json
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
METHOD = 1  # of measuring: costs of another one are measured again
WORTH_A_FILE = 0.2  # seconds that measuring took
Source = Literal["measured", "this process", "cache"]


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
        if len(self.sizes) == 1:
            return self.seconds[0] * tokens
        right = min(bisect_left(self.sizes, tokens, 1), len(self.sizes) - 1)
        a, b = self.sizes[right - 1 : right + 1]
        low, high = self.seconds[right - 1 : right + 1]
        return max(low, low + (high - low) * (tokens - a) / (b - a))


_KNOWN: dict[str, PassCost] = {}  # of this process


def cost_of_passes(
    transformer: Transformer, packed: Packed | None = None, *, rowwise: bool = False
) -> tuple[PassCost, Source]:
    """The cost of passes and where it is from; measured now if it is not known yet.

    `packed` are weights packed for passes over a few tokens; with `rowwise`, each token attends as
    in a one-token pass.
    """
    about = _circumstances(transformer, packed, rowwise)
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    if (known := _KNOWN.get(key)) is not None:
        return known, "this process"
    # Other devices are measured in no time, and are not described well enough to be recognised.
    file = cache_root() / "costs" / f"{key}.json" if about["devices"] == ["cpu"] else None
    if file is not None and (cost := _read(file, about)) is not None:
        source: Source = "cache"
    else:
        source, started = "measured", time.perf_counter()
        cost = measure_passes(transformer, packed, rowwise=rowwise)
        if file is not None and time.perf_counter() - started > WORTH_A_FILE:
            with suppress(CannotWrite, OSError):  # the next process measures again
                write_json(file, {"about": about, "cost": asdict(cost)})
    _KNOWN[key] = cost
    return cost, source


def _circumstances(
    transformer: Transformer, packed: Packed | None, rowwise: bool
) -> dict[str, Any]:
    """What the cost of a pass depends on, as plain JSON types."""
    model = transformer.model
    # Names that begin with "_" say where a model was loaded from.
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    structure = json.dumps([config, shapes], sort_keys=True, default=str)
    return {
        "method": METHOD,
        "model": type(model).__name__,
        "structure": hashlib.sha256(structure.encode()).hexdigest()[:32],
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "devices": sorted({str(p.device) for p in model.parameters()}),
        "packed": None if packed is None else packed.layout.name,
        "rowwise": rowwise,
        "threads": torch.get_num_threads(),
        "machine": machine(),
    }


@cache
def machine() -> dict[str, Any]:
    """The processor, and the versions of what runs on it."""
    lines: list[str] = []
    with suppress(OSError):  # Linux only
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "processor": next(names, platform.processor()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "layerleap": layerleap.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _read(file: Path, about: dict[str, Any]) -> PassCost | None:
    """What an earlier process measured; None if nothing, or if the file is damaged or foreign."""
    try:
        stored = read_json(file)
        if stored["about"] != about:
            return None
        cost = stored["cost"]
        return PassCost(
            tuple(map(int, cost["sizes"])),
            tuple(map(float, cost["seconds"])),
            tuple(map(int, cost["packed"])),
            int(cost["context"]),
            int(cost["repeats"]),
        )
    except (BadArtifact, BadSettings, KeyError, TypeError, ValueError, OverflowError):
        return None


def measure_passes(
    transformer: Transformer,
    packed: Packed | None = None,
    *,
    rowwise: bool = False,
    repeats: int = REPEATS,
) -> PassCost:
    """Measure the cost of passes; arguments are those of `cost_of_passes`.

    Sizes take turns, so that a slow moment affects all of them. The fastest of the `repeats`
    counts: other load can only slow passes down, and it slows passes over many tokens more.
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
                tree = Tree.chain(ids[context : context + size])
                logits = transformer.logits(cursor.run(tree).h)
                if logits.device.type != "cpu":
                    torch.accelerator.synchronize(logits.device)
                if turn:
                    seconds[size].append(time.perf_counter() - started)
                cursor.cut(context)
    best = tuple(min(values) for values in seconds.values())
    sizes = () if packed is None else packed.sizes
    return PassCost(SIZES, best, sizes, context, len(seconds[1]))
