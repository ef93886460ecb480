"""How long `ll.read` takes beside the least that a grid needs: a pass, and the head at each layer.

By hand: the states of all layers are captured and given to the tail, as many rows at a time as
`ll.read` takes. Nothing is done with the logits. Both read every position with one thread.
"""

import torch
from common import MODEL, Row, interleave, median

import layerleap as ll
from layerleap.lens.lens import chunks

TEXTS = {
    "short": "The capital of France is",
    "long": "The old harbour was built by fishermen, who had come from the islands in the north "
    "to sell their catch. When the railway reached the town, most of them left their boats, and "
    "the harbour became a place where people from the city spent their summers.",
}


def run(*, smoke: bool) -> list[Row]:
    """One row, judged on a short prompt; the detail has a long one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        transformer = ll.load(MODEL)
        samples = {name: _samples(transformer, text, smoke) for name, text in TEXTS.items()}
    finally:
        torch.set_num_threads(threads)
    seconds = {name: {side: median(by[side]) for side in by} for name, by in samples.items()}
    short, long = seconds["short"], seconds["long"]
    tokens = {name: len(transformer.tokenizer(text)["input_ids"]) for name, text in TEXTS.items()}
    detail = {
        "note": "ll.read of a short prompt through the logit lens (ours); its states "
        "captured and passed through the tail (peer); every layer and position, one thread",
        "tokens": tokens,
        "long": {**long, "ratio": long["read"] / long["by_hand"]},
        "samples": samples,
        "n": len(samples["short"]["read"]),
    }
    return [
        Row("read_time", short["read"], short["by_hand"], "seconds", at_most=1.3, detail=detail)
    ]


def _samples(transformer: ll.Transformer, text: str, smoke: bool) -> dict[str, list[float]]:
    def read(_: int) -> None:
        ll.read(transformer, text, bank=None)

    @torch.inference_mode()
    def by_hand(_: int) -> None:
        states = torch.cat([h[0] for h in transformer.capture(text).states.values()])
        for rows in chunks(len(states), transformer.d_vocab):
            transformer.logits(states[rows])

    sides = {"read": read, "by_hand": by_hand}
    interleave(sides, 1)  # warm-up
    return interleave(sides, 1 if smoke else 11)
