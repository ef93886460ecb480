"""Activation patching on the bundled model: our grid against the same cells one by one.

`patch_grid`: all states of 30 layers and 14 positions. The peer puts each in with a plain PyTorch
hook and runs the whole model; some cells are timed, and their mean stands for all. The prompts
differ in their first token, so that no cell is the same in both runs. `patch_gradient_passes`: the
time of the gradient method, without its comparison with exact cells, in passes over one prompt.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import MODEL, Row

import layerleap as ll

CLEAN, CORRUPT = (
    f"{one} and John went to the store, John gave a drink to" for one in ("Mary", "Tom")
)
TIMED = 60  # cells of the peer
REPEATS = 3


def run(*, smoke: bool) -> list[Row]:
    """One row for the exact grid, one for the gradient method."""
    model = ll.load(MODEL, dtype=torch.float32)
    layers = [0, 15] if smoke else list(range(model.n_layers))
    metric = ll.metrics.logit_difference(" Mary", " Tom")
    prompts = [model.tokenizer(one)["input_ids"] for one in (CLEAN, CORRUPT)]
    states = model.capture(prompts[0]).states

    def grid(**options: Any) -> Any:
        return ll.patch(model, *prompts, metric=metric, layers=layers, progress=False, **options)

    cells = [(layer, position) for layer in layers for position in range(len(prompts[0]))]
    grid()
    ours = statistics.median(_seconds(grid) for _ in range(1 if smoke else REPEATS))
    chosen = random.Random(0).sample(cells, min(len(cells), 4 if smoke else TIMED))
    ids = torch.tensor([prompts[1]])
    one = statistics.fmean(
        _seconds(partial(_patched, model, ids, layer, position, states[layer][0, position]))
        for layer, position in chosen
    )
    plain = statistics.median(_seconds(lambda: _plain(model, ids)) for _ in range(9))
    gradient = statistics.median(
        _seconds(lambda: grid(method="gradient", check=0)) for _ in range(1 if smoke else REPEATS)
    )
    detail = {"note": f"{len(layers)} layers x {len(prompts[0])} positions of {MODEL}, float32"}
    return [
        Row("patch_grid", ours, one * len(cells), "seconds", at_most=0.35, detail=detail),
        Row(
            "patch_gradient_passes",
            gradient / plain,
            None,
            "passes",
            at_most=5,
            detail=detail,
        ),
    ]


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


@torch.no_grad()
def _plain(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model.model(input_ids=ids).logits[0, -1]
    return logits


def _patched(
    model: Any, ids: torch.Tensor, layer: int, position: int, state: torch.Tensor
) -> torch.Tensor:
    """The logits with one state put in by a plain hook."""

    def put(h: torch.Tensor) -> torch.Tensor:
        h = h.clone()
        h[0, position] = state
        return h

    def after(_: Any, args: Any, output: Any) -> Any:
        return (put(output[0]), *output[1:]) if isinstance(output, tuple) else put(output)

    block = model.block(max(1, layer))
    handle = (
        block.register_forward_hook(after)
        if layer
        else block.register_forward_pre_hook(lambda _, args: (put(args[0]), *args[1:]))
    )
    try:
        return _plain(model, ids)
    finally:
        handle.remove()
