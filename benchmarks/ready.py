"""One process that loads a folder of weights with one library, and says how long that took.

    python benchmarks/ready.py SIDE FOLDER

Out: one line of JSON. "loaded" is when the library returns its model, "ready" when it has run the
first prompt: only then are all weights in memory, because files are mapped, and one of the peers
returns before it has read any. The clock starts before the first import.
"""

import time

STARTED = time.perf_counter()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

TEXT = "The capital of France is"


def layerleap(folder: str) -> Callable[[], Any]:
    """Verified by all laws."""
    import layerleap as ll

    model = ll.load(folder)
    return lambda: model.capture(TEXT, logits=True).logits


def transformers(folder: str) -> Callable[[], Any]:
    """The model and its tokenizer, and nothing else."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda: model(**tokenizer(TEXT, return_tensors="pt")).logits


def transformer_lens(folder: str) -> Callable[[], Any]:
    """Its bridge, which keeps the weights of transformers."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(folder, dtype=torch.float32, device="cpu")
    return lambda: model(model.tokenizer(TEXT, return_tensors="pt").input_ids)


def nnterp(folder: str) -> Callable[[], Any]:
    """Its standardised model, with the checks that it makes by default."""
    from nnterp import StandardizedTransformer

    model = StandardizedTransformer(folder)

    def run() -> Any:
        with model.trace(TEXT):
            logits = model.logits.save()
        return logits  # noqa: RET504  # not inside: the library runs the block elsewhere

    return run


def added(folder: str) -> Callable[[], Any]:
    """Like `layerleap`, once a tiny model of the same class has made Python load every module."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import layerleap as ll

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.from_pretrained(folder, vocab_size=64, **small, **heads)
    ll.load(AutoModelForCausalLM.from_config(config).eval())
    global BEFORE
    BEFORE = resident()
    return layerleap(folder)


SIDES = {side.__name__: side for side in (layerleap, transformers, transformer_lens, nnterp, added)}
BEFORE = 0.0  # MiB, before the model was loaded; measured for `added` only


def resident() -> float:
    """Resident memory in MiB, with the pages of mapped files that were read."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(side: str, folder: str) -> None:
    """Load, run, and print what it took."""
    import torch

    torch.set_num_threads(1)
    run = SIDES[side](folder)
    times = {"loaded": time.perf_counter() - STARTED, "loaded_mib": resident()}
    with torch.inference_mode():
        run()
    times |= {"ready": time.perf_counter() - STARTED, "ready_mib": resident()}
    times["processor"] = time.process_time()  # less than "ready" if others keep the machine busy
    print(json.dumps({**times, "before_mib": BEFORE}))


if __name__ == "__main__":
    main(*sys.argv[1:])
