"""FFNs that keep k neurons when one token is decoded: kept rows gathered, and the whole product.

`ffn_gather` is for the down-projections of the bundled model, one block after the other so that
weights come from memory, as they do when a text is decoded. An eighth of the neurons is kept;
choosing them is part of our time. `ffn_decoding` is a whole decoded token. There, up- and
gate-projections are computed in full, so at most a third of each FFN can be saved.
"""

from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from common import MODEL, Row, interleave, median

from layerleap import load
from layerleap.act.edits import TopKNeurons
from layerleap.models.weights import feed_forward

KEPT = 8  # one neuron in so many
PROMPT = "The history of the city begins in the early Middle Ages, when"


@torch.no_grad()
def run(*, smoke: bool) -> list[Row]:
    """The down-projections alone, and a whole decoded token."""
    model = load(MODEL)
    ffn = feed_forward(model, 1)
    k, n = ffn.n_neurons // KEPT, model.n_layers
    row = torch.randn(1, ffn.n_neurons, generator=torch.Generator().manual_seed(0))
    changes = TopKNeurons(k, gather=True).changes(model)
    functions = [change.function for change in changes]
    pairs = list(zip(functions[::2], functions[1::2], strict=True))
    downs = [feed_forward(model, block).module(model).forward for block in range(1, n + 1)]

    def ours(number: int) -> None:
        for (keep, gather), down in zip(pairs, downs, strict=True):
            gather(down, keep(row, None)[0])

    def peer(number: int) -> None:
        for down in downs:
            down(row)

    ours(0)
    peer(0)  # warm-up of both sides
    samples = interleave({"ours": ours, "peer": peer}, 3 if smoke else 101)
    (keep, gather), down = pairs[0], downs[0]
    states = keep(row, None)[0]
    gap = float((gather(down, states) - down(states)).abs().max())
    detail = {
        "note": "one down-projection of one token: an eighth of the neurons chosen by size and "
        "gathered, against the whole product",
        "k": k,
        "n_neurons": ffn.n_neurons,
        "width": model.d_model,
        "largest_gap": gap,
        "samples": samples,
    }
    sides = (1e6 * median(samples[side]) / n for side in ("ours", "peer"))
    return [
        Row("ffn_gather", *sides, "us", at_least=1.0, over="peer/ours", detail=detail),
        _decoding(k, smoke),
    ]


def _decoding(k: int, smoke: bool) -> Row:
    """Seconds a token of the whole model, and of copies with sparse FFNs."""
    tokens = 4 if smoke else 32
    edits = {"whole": (), "gathered": (TopKNeurons(k, gather=True),), "masked": (TopKNeurons(k),)}
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    options |= {"do_sample": False, "temperature": None, "top_p": None}
    with ExitStack() as stack:
        sides = {}
        for name, changes in edits.items():
            model = load(MODEL)
            stack.enter_context(model.edit(*changes) if changes else nullcontext())
            inputs = model.tokenizer(PROMPT, return_tensors="pt")
            sides[name] = partial(_generate, model.model, {**inputs, **options})
        for side in sides.values():
            side(0)  # warm-up
        samples = interleave(sides, 1 if smoke else 7)
    seconds = {name: median(samples[name]) / tokens for name in samples}
    detail = {
        "note": "a decoded token with an eighth of the neurons, gathered (ours), and of the "
        "whole model (peer); `masked` sets the others to 0 and multiplies by them",
        "k": k,
        "seconds": seconds,
        "samples": samples,
        "n": tokens,
    }
    times = seconds["gathered"], seconds["whole"]
    return Row("ffn_decoding", *times, "seconds", at_least=1.0, over="peer/ours", detail=detail)


def _generate(model: Any, options: dict[str, Any], number: int) -> None:
    model.generate(**options)
