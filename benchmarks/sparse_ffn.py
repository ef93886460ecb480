"""FFNs that keep k neurons when one token is decoded: kept rows gathered, and the whole product.

`ffn_gather` are the down-projections of the bundled model, one block after the other so that weights
come from memory as they do when a text is decoded, with an eighth of the neurons kept: choosing them
is part of our time. `ffn_decode` is a whole decoded token, with the edit in
force in every block. Up- and gate-projections are computed in full on both sides, so at most a
third of an FFN can be saved.
"""

from functools import partial

import torch
from common import MODEL, Row, interleave, median

from layerleap import load
from layerleap.act.edits import TopKNeurons
from layerleap.models.weights import feed_forward

KEPT = 8  # one neuron in so many
PROMPT = "The history of the city begins in the early Middle Ages, when"


@torch.no_grad()
def run(*, smoke: bool) -> list[Row]:
    """One row for the down-projection alone, one for decoding."""
    model = load(MODEL)
    return [_projection(model, smoke), _decoding(model, smoke)]


def _projection(model: object, smoke: bool) -> Row:
    ffn = feed_forward(model, 1)
    k, n = ffn.n_neurons // KEPT, model.n_layers
    row = torch.randn(1, ffn.n_neurons, generator=torch.Generator().manual_seed(0))
    changes = TopKNeurons(k, gather=True).changes(model)
    pairs = [(one.function, two.function) for one, two in zip(changes[::2], changes[1::2])]
    downs = [feed_forward(model, block).module(model).forward for block in range(1, n + 1)]

    def ours(number: int) -> None:
        for (keep, gather), down in zip(pairs, downs, strict=True):
            gather(down, keep(row, None)[0])

    def peer(number: int) -> None:
        for down in downs:
            down(row)

    ours(0)
    peer(0)  # warm-up of both sides
    found = interleave({"ours": ours, "peer": peer}, 3 if smoke else 101)
    (keep, gather), down = pairs[0], downs[0]
    kept = keep(row, None)[0]
    gap = float((gather(down, kept) - down(kept)).abs().max())
    return Row(
        "ffn_gather", 1e6 * median(found["ours"]) / n, 1e6 * median(found["peer"]) / n, "us",
        1.0, ">=", over="peer/ours",
        detail={
            "note": "one down-projection of one token: an eighth of the neurons chosen by size "
            "and gathered, against the whole product",
            "k": k, "n_neurons": ffn.n_neurons, "width": model.d_model, "largest_gap": gap,
            "samples": found,
        },
    )  # fmt: skip


def _decoding(model: object, smoke: bool) -> Row:
    tokens, k = (4, 16) if smoke else (32, feed_forward(model, 1).n_neurons // KEPT)
    inputs = model.tokenizer(PROMPT, return_tensors="pt")
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False,
               "temperature": None, "top_p": None}  # fmt: skip
    write = partial(model.model.generate, **inputs, **options, pad_token_id=0)

    def ours(number: int) -> None:
        with model.edit(TopKNeurons(k, gather=True)):
            write()

    def masked(number: int) -> None:
        with model.edit(TopKNeurons(k)):
            write()

    sides = {"ours": ours, "peer": lambda number: write(), "masked": masked}
    for side in sides.values():
        side(0)
    found = interleave(sides, 1 if smoke else 5)
    seconds = {name: median(samples) / tokens for name, samples in found.items()}
    return Row(
        "ffn_decode", seconds["ours"], seconds["peer"], "s a token", 1.0, ">=", over="peer/ours",
        detail={
            "note": "decoding with an eighth of the neurons in every block, gathered, against the "
            "whole model; `masked` is the same edit without gathering",
            "k": k, "tokens": tokens, "masked": seconds["masked"], "samples": found,
        },
    )  # fmt: skip
