"""One process that attributes, patches and looks at attention with one library.

    PYTHON benchmarks/verbs_side.py SIDE FOLDER [ROUNDS]

Out: one line of JSON: seconds per task, and a number of each result, by which sides are compared.
Needs the library of its side alone, so that each can have an environment of its own. The code of a
task is what a user of that library would write; states are patched for a batch of positions at a
time by all.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

TEXT, ANSWER, OTHER = "The capital of France is", " Paris", " London"
CLEAN, CORRUPT = (
    f"{one} and John went to the store, John gave a drink to" for one in ("Mary", "Tom")
)
NAMES = " Mary", " Tom"
LONG = (
    "The old harbour was built by fishermen, who had come from the islands in the north to sell "
    "their catch. When the railway reached the town, most of them left their boats."
)
Tasks = Iterator[tuple[str, Callable[[], float]]]


def layerleap(folder: str) -> Tasks:
    """One call each."""
    import layerleap as ll

    model = ll.load(folder)
    metric = ll.metrics.logit_difference(*NAMES)

    def attribution() -> float:
        rows = ll.attribute(model, TEXT, ANSWER, against=OTHER, by="head").rows()
        return max(row["direct"] for row in rows if row["head"] is not None)

    def patching() -> float:
        layers = range(model.n_layers)
        grid = ll.patch(model, CLEAN, CORRUPT, metric=metric, layers=layers, progress=False)
        share = max(row["share"] for row in grid.rows())
        return grid.corrupt + share * (grid.clean - grid.corrupt)

    def attention() -> float:
        weights = ll.attention(model, LONG).weights
        return sum(float(one.square().sum()) for one in weights.values())

    yield from (("attribution", attribution), ("patching", patching), ("attention", attention))


def transformer_lens(folder: str) -> Tasks:
    """Its bridge, which keeps the weights of transformers."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(folder, dtype=torch.float32, device="cpu")

    def ids(text: str) -> Any:
        return model.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def token(text: str) -> int:
        return int(model.tokenizer(text, add_special_tokens=False).input_ids[0])

    def attribution() -> float:
        model.set_use_attn_result(True)
        _, cache = model.run_with_cache(ids(TEXT))
        heads = cache.stack_head_results(layer=-1, pos_slice=-1)[:, 0]
        heads = cache.apply_ln_to_stack(heads[:, None], layer=-1, pos_slice=-1)[:, 0]
        direction = model.W_U[:, token(ANSWER)] - model.W_U[:, token(OTHER)]
        model.set_use_attn_result(False)
        return float((heads * model.ln_final.weight @ direction).max())

    def patching() -> float:
        clean, corrupt = ids(CLEAN), ids(CORRUPT)
        _, cache = model.run_with_cache(clean, names_filter=lambda name: "resid_pre" in name)
        positions = torch.arange(clean.shape[1])
        best = -float("inf")
        for layer in range(model.cfg.n_layers):

            def put(value: Any, hook: Any, layer: int = layer) -> Any:
                value[positions, positions] = cache["resid_pre", layer][0]
                return value

            logits = model.run_with_hooks(
                corrupt.repeat(len(positions), 1),
                fwd_hooks=[(f"blocks.{layer}.hook_resid_pre", put)],
            )[:, -1]
            best = max(best, float((logits[:, token(NAMES[0])] - logits[:, token(NAMES[1])]).max()))
        return best

    def attention() -> float:
        _, cache = model.run_with_cache(
            ids(LONG), names_filter=lambda n: n.endswith("hook_pattern")
        )
        return sum(
            float(cache["pattern", layer].square().sum()) for layer in range(model.cfg.n_layers)
        )

    yield from (("attribution", attribution), ("patching", patching), ("attention", attention))


def nnterp(folder: str) -> Tasks:
    """Its standardised model; for attention, one that was loaded with eager attention."""
    import torch
    from nnterp import StandardizedTransformer

    model = StandardizedTransformer(folder)
    eager = StandardizedTransformer(folder, enable_attention_probs=True)

    def ids(text: str) -> Any:
        return model.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def token(text: str) -> int:
        return int(model.tokenizer(text, add_special_tokens=False).input_ids[0])

    def patching() -> float:
        clean, corrupt = ids(CLEAN), ids(CORRUPT)
        n = clean.shape[1]
        states = []
        with model.trace(clean):
            for layer in range(model.num_layers):
                states.append(model.layers_input[layer].save())
        best, rows = -float("inf"), torch.arange(n)
        for layer in range(model.num_layers):
            with model.trace(corrupt.repeat(n, 1)):
                model.layers_input[layer][rows, rows] = states[layer][0]
                logits = model.logits[:, -1].save()
            best = max(best, float((logits[:, token(NAMES[0])] - logits[:, token(NAMES[1])]).max()))
        return best

    def attention() -> float:
        weights = []
        with eager.trace(ids(LONG)):
            for layer in range(eager.num_layers):
                weights.append(eager.attention_probabilities[layer].save())
        return sum(float(one.square().sum()) for one in weights)

    yield from (("patching", patching), ("attention", attention))


SIDES = {side.__name__: side for side in (layerleap, transformer_lens, nnterp)}


def main(side: str, folder: str, rounds: str = "3") -> None:
    """Run every task once to warm up, then a few times."""
    import torch

    torch.set_num_threads(1)
    results = {}
    with torch.no_grad():
        for name, task in SIDES[side](folder):
            value, seconds = task(), []
            for _ in range(int(rounds)):
                started = time.perf_counter()
                task()
                seconds.append(time.perf_counter() - started)
            results[name] = {"value": value, "seconds": statistics.median(seconds)}
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
