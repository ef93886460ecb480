"""The strongest token pairs of one head of the bundled model: time and memory.

The matrix of all pairs of 49,152 tokens takes 9.7 GB; the peer is the size of that matrix, which is
not made. The search runs in its own process (`python benchmarks/head_pairs.py`), once for each form
of a head in the middle. Its extra memory is the peak of the process while it searches, minus what
it takes with the loaded model.
"""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import MODEL, Row

from layerleap.memory import peak_memory

HEAD = "L15.H4"


def run(*, smoke: bool) -> list[Row]:
    """One row each for seconds and memory, of the slower and the larger form."""
    command = [sys.executable, __file__, *(["smoke"] if smoke else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"searching pairs failed ({done.returncode}): {last}")
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = max(form["seconds"] for form in told["forms"].values())
    extra = max(form["extra_mib"] for form in told["forms"].values())
    whole = 4 * told["tokens"] ** 2 / 2**20
    detail = {"note": f"50 strongest pairs of {MODEL} {HEAD}, all tokens, float32", **told}
    return [
        Row("head_pairs_seconds", seconds, None, "seconds", at_most=30, detail=detail),
        Row("head_pairs_memory", extra, whole, "MiB", at_most=1024, detail=detail),
    ]


def search(smoke: bool) -> None:
    """Search both forms and print what it took."""
    import torch

    from layerleap import load, weights

    parameters: Any = weights(_tiny() if smoke else load(MODEL, dtype=torch.float32))
    head, forms = "L1.H0" if smoke else HEAD, {}
    parameters.read(head + ".V0")  # the view of the weights is verified once, on first use
    before = peak_memory() or 0.0
    for form in ("vo", "qk"):
        with suppress(OSError):  # the peak starts anew, from what is in use
            Path("/proc/self/clear_refs").write_text("5")
        base = peak_memory() or 0.0
        started = time.perf_counter()
        found = parameters.pairs(head, form=form, progress=False)
        forms[form] = {
            "seconds": time.perf_counter() - started,
            "extra_mib": (peak_memory() or 0.0) - base,
            "first": f"{found.pairs[0].first.label} -> {found.pairs[0].second.label}",
        }
    print(json.dumps({"forms": forms, "model_mib": before, "tokens": found.n_tokens}))


def _tiny() -> Any:
    """A small random model without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from layerleap import Transformer

    config = LlamaConfig(
        vocab_size=6000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return Transformer.wrap(LlamaForCausalLM(config).eval(), name="tiny")


if __name__ == "__main__":
    search(smoke="smoke" in sys.argv[1:])
