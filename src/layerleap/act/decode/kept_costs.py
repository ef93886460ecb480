"""Measured costs of passes, kept for later decoders and later processes.

In: a wrapped decoder. Out: its `PassCost`, measured now or earlier under the same circumstances.

A file is believed only if it names the same circumstances as the question: structure and dtype of
the model, how it multiplies, the processor, threads and versions. Costs decide how many drafts are
tried and nothing else, so a wrong file can make decoding slower but never change a token.
"""

import hashlib
import json
import os
import platform
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

import layerleap
from layerleap.act.decode.pass_cost import PassCost, measure_passes
from layerleap.errors import BadArtifact, BadSettings, CannotWrite
from layerleap.files import cache_root, read_json, write_json
from layerleap.models.cursor.packed import Packed
from layerleap.models.transformer import Transformer

METHOD = 1  # of measuring: costs of another one are measured again
WORTH_A_FILE = 0.2  # seconds that measuring took
Source = Literal["measured", "this process", "cache"]
_KNOWN: dict[str, PassCost] = {}  # of this process


def cost_of_passes(
    transformer: Transformer, packed: Packed | None = None, *, rowwise: bool = False
) -> tuple[PassCost, Source]:
    """The cost of passes and where it is from; measured now if it is not known yet.

    Args:
        transformer: a decoder.
        packed: its weights, packed for passes over a few tokens.
        rowwise: each token attends as in a pass of its own.
    """
    about = circumstances(transformer, packed, rowwise)
    if (known := _KNOWN.get(key := _key(about))) is not None:
        return known, "this process"
    # Other devices are measured in no time, and are not described well enough to be recognised.
    is_kept = about["devices"] == ["cpu"]
    source: Source = "cache"
    cost = _recall(about) if is_kept else None
    if cost is None:
        source, started = "measured", time.perf_counter()
        cost = measure_passes(transformer, packed, rowwise=rowwise)
        if is_kept and time.perf_counter() - started > WORTH_A_FILE:
            _keep(about, cost)
    _KNOWN[key] = cost
    return cost, source


def circumstances(transformer: Transformer, packed: Packed | None, rowwise: bool) -> dict[str, Any]:
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
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "layerleap": layerleap.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _recall(about: dict[str, Any]) -> PassCost | None:
    """What an earlier process measured; None if nothing, or if the file is damaged or foreign."""
    try:
        found = read_json(_file(about))
        if found["about"] != about:
            return None
        return PassCost.from_dict(found["cost"])
    except (BadArtifact, BadSettings, KeyError, TypeError, ValueError):
        return None


def _keep(about: dict[str, Any], cost: PassCost) -> None:
    """Write a measurement down for later processes; a cache that cannot be written is no error."""
    with suppress(CannotWrite, OSError):
        write_json(_file(about), {"about": about, "cost": cost.to_dict()})


def _key(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


def _file(about: dict[str, Any]) -> Path:
    return cache_root() / "costs" / f"{_key(about)}.json"
