"""How long a user waits for the first token: `generate`, a first and a second decoder.

Every round is two fresh processes, the first with an empty cache of pass costs and the second with
what the first one left there. In each, `generate` writes twice before (the first text of a process
warms up libraries), then a new decoder writes, then another new one.

Out: seconds of the first decoder beyond `generate`, and the second decoder over `generate`, with
the cache empty; the same with the cache filled, one thread, and totals of 128 tokens, are details.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import MODEL, Row, child, median

from layerleap.files import cache_root

FIRST, SECOND = 2.0, 1.2  # seconds beyond `generate`, and times `generate`
PROMPT = "Once upon a time there was a small town by the sea, where"
THREADS = (1, 2)

WORKER = """
import json, sys, time
import torch
import layerleap as ll
from layerleap.maps.fit import default_bank

name, prompt, tokens, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
model = ll.load(name)
bank = default_bank(model)
model.model.generation_config.eos_token_id = None
ids = model.tokenizer(prompt, return_tensors="pt")["input_ids"]

class Watch:
    def __init__(self):
        self.times = []
    def put(self, _):
        self.times.append(time.perf_counter())
    def end(self):
        pass

def write(custom):
    watch = Watch()
    how = {"streamer": watch} if custom is None else {"stream_to": watch, "custom_generate": custom}
    started = time.perf_counter()
    model.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, top_p=None,
        max_new_tokens=tokens, pad_token_id=0, **how,
    )
    preparation = None if custom is None else custom.stats[0].to_dict()["preparation"]
    return {
        "first": watch.times[1] - started, "whole": time.perf_counter() - started,
        "preparation": preparation,
    }

write(None)
decoders = {"generate": None, "first": ll.decoder(bank), "second": ll.decoder(bank)}
print(json.dumps({side: write(custom) for side, custom in decoders.items()}))
"""


def run(*, smoke: bool) -> Iterator[Row]:
    """Two rows; one round is enough to see that everything works."""
    rounds, tokens = (1, 8) if smoke else (3, 128)
    typical: dict[str, Any] = {}
    for threads in THREADS[-1 if smoke else 0 :]:
        samples = [_round(tokens, threads) for _ in range(rounds)]
        for state in ("empty", "filled"):
            typical[f"{threads} threads, cache {state}"] = {
                side: {
                    "first_token": median(sample[state][side]["first"] for sample in samples),
                    "whole_text": median(sample[state][side]["whole"] for sample in samples),
                    "preparation": samples[0][state][side]["preparation"],
                }
                for side in ("generate", "first", "second")
            }
    sides = typical[f"{THREADS[-1]} threads, cache empty"]
    waits = {side: times["first_token"] for side, times in sides.items()}
    detail = {"by_case": typical, "tokens": tokens, "n": rounds, "threads_of_row": THREADS[-1]}
    yield Row(
        "first_token_first",
        waits["first"] - waits["generate"],
        None,
        "seconds",
        at_most=FIRST,
        detail={**detail, "note": "seconds beyond generate's, of the first decoder of a process"},
    )
    yield Row("first_token_second", waits["second"], waits["generate"], "seconds", at_most=SECOND)


def _round(tokens: int, threads: int) -> dict[str, dict[str, dict[str, float]]]:
    """Both processes of one round, by the state of the cache that they found."""
    with tempfile.TemporaryDirectory() as empty:
        for part in cache_root().iterdir():  # all that is cached, but no costs of passes
            if part.name != "costs":
                (Path(empty) / part.name).symlink_to(part)
        env = {**os.environ, "LAYERLEAP_CACHE": empty, "HF_HUB_OFFLINE": "1"}
        words = (MODEL, PROMPT, tokens, threads)
        return {state: child("-c", WORKER, *words, env=env) for state in ("empty", "filled")}
