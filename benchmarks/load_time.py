"""How long it takes from the first import to a model that has read a prompt, and memory then.

Each load runs in a process of its own, with one thread. The peers are TransformerLens and nnterp,
if they are installed in this environment; otherwise `from_pretrained` of transformers.
"""

import importlib.util
import os
from pathlib import Path

from common import MODEL, Row, child, median

from layerleap import zoo

PEERS = ("transformer_lens", "nnterp")
READY = str(Path(__file__).with_name("ready.py"))
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
Samples = dict[str, list[dict[str, float]]]


def run(*, smoke: bool) -> list[Row]:
    """One row for the time, one for the memory."""
    folder, rounds = zoo.fetch(MODEL), 1 if smoke else 3
    installed = [name for name in PEERS if importlib.util.find_spec(name) is not None]
    sides = ["layerleap", "transformers", *installed]
    left_out = {name: "not installed" for name in PEERS if name not in installed}
    for name in installed:  # they need much that pip may not have been able to install
        try:
            child(READY, name, folder, env=ENV)
        except RuntimeError as error:
            sides.remove(name)
            left_out[name] = str(error)
    if not smoke:
        child(
            READY, "layerleap", folder, env=ENV
        )  # warm-up: the weights are in the cache of the system
    samples: Samples = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            samples[side].append(child(READY, side, folder, env=ENV))
    memory = [child(READY, "added", folder, env=ENV) for _ in range(1 if smoke else 2)]
    weights = (folder / "model.safetensors").stat().st_size / 2**20
    return [_time(samples, left_out), _memory(samples, memory, weights)]


def _medians(samples: Samples, key: str) -> dict[str, float]:
    return {side: median(times[key] for times in samples[side]) for side in samples}


def _time(samples: Samples, left_out: dict[str, str]) -> Row:
    seconds = _medians(samples, "ready")
    peers = {side: seconds[side] for side in PEERS if side in seconds}
    peers = peers or {"transformers": seconds["transformers"]}
    peer = min(peers, key=peers.__getitem__)
    detail = {
        "note": f"from the first import to the end of the first prompt, warm: layerleap, with "
        f"all laws (ours), and {peer}, the fastest peer here (peer); one thread",
        "seconds": seconds,
        "until_loaded": _medians(samples, "loaded"),
        "processor_seconds": _medians(samples, "processor"),
        "left_out": left_out,
        "samples": samples,
        "n": len(samples["layerleap"]),
    }
    return Row(
        "ready_time", seconds["layerleap"], peers[peer], "seconds", at_most=1.1, detail=detail
    )


def _memory(samples: Samples, memory: list[dict[str, float]], weights: float) -> Row:
    added = median(sample["ready_mib"] - sample["before_mib"] for sample in memory)
    detail = {
        "note": "resident memory that a ready model with its tokenizer adds to a process that "
        "has loaded a tiny model before, so without modules (ours); its weights (peer)",
        "resident": _medians(samples, "ready_mib"),
        "resident_until_loaded": _medians(samples, "loaded_mib"),
        "samples": memory,
        "n": len(memory),
    }
    return Row("ready_memory", added, weights, "MiB", at_most=1.2, detail=detail)
