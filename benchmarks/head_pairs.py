"""The strongest token pairs of one head of the bundled model: time and memory.

The matrix of all pairs of 49,152 tokens takes 9.7 GB; the peer is the size of that matrix, which is
not made. The search runs in its own process (`python benchmarks/head_pairs.py`), once for each form
of a head in the middle. Its extra memory is the peak of the process while it searches, minus what
it takes with the loaded model.
"""

import json
import sys
import time
from typing import Any

from common import MODEL, Row, child, fresh_peak, tiny

from layerleap.memory import peak_memory

HEAD = "L15.H4"


def run(*, smoke: bool) -> list[Row]:
    """One row each for seconds and memory, of the slower and the larger form."""
    result = child(__file__, *(["smoke"] if smoke else []))
    seconds, extra = (
        max(form[key] for form in result["forms"].values()) for key in ("seconds", "extra_mib")
    )
    whole = 4 * result["tokens"] ** 2 / 2**20
    detail = {"note": f"50 strongest pairs of {MODEL} {HEAD}, all tokens, float32", **result}
    return [
        Row("head_pairs_seconds", seconds, None, "seconds", at_most=30, detail=detail),
        Row("head_pairs_memory", extra, whole, "MiB", at_most=1024, detail=detail),
    ]


def search(smoke: bool) -> None:
    """Search both forms and print what it took."""
    import torch

    from layerleap import load, weights

    parameters: Any = weights(tiny(vocabulary=6000) if smoke else load(MODEL, dtype=torch.float32))
    head, forms = "L1.H0" if smoke else HEAD, {}
    parameters.read(head + ".V0")  # the view of the weights is verified once, on first use
    before = peak_memory() or 0.0
    for form in ("vo", "qk"):
        base = fresh_peak()
        started = time.perf_counter()
        result = parameters.pairs(head, form=form, progress=False)
        forms[form] = {
            "seconds": time.perf_counter() - started,
            "extra_mib": (peak_memory() or 0.0) - base,
            "first": f"{result.pairs[0].first.label} -> {result.pairs[0].second.label}",
        }
    print(json.dumps({"forms": forms, "model_mib": before, "tokens": result.n_tokens}))


if __name__ == "__main__":
    search(smoke="smoke" in sys.argv[1:])
