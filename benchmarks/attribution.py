"""What looking inside costs: attribution by head over a bare pass, patterns over an eager pass.

The eager pass is that of a copy of the model which returns its own attention weights, as others
need it; `ll.attention` works on the model as it is loaded. Both also measure and verify.
"""

from copy import deepcopy
from typing import Any

import torch
from common import MODEL, Row, interleave, median

import layerleap as ll

SHORT = "The capital of France is"
LONG = (
    "The old harbour was built by fishermen, who had come from the islands in the north to sell "
    "their catch. When the railway reached the town, most of them left their boats."
)


def run(*, smoke: bool) -> list[Row]:
    """A row each, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        transformer = ll.load(MODEL)
        return [_attribution(transformer, smoke), _patterns(transformer, smoke)]
    finally:
        torch.set_num_threads(threads)


def _ids(transformer: ll.Transformer, text: str) -> torch.Tensor:
    return torch.tensor([transformer.need_tokenizer()(text)["input_ids"]])


def _row(name: str, sides: dict[str, Any], bar: float, note: str, smoke: bool) -> Row:
    interleave(sides, 1)  # warm-up: heads are verified once per model
    samples = interleave(sides, 1 if smoke else 11)
    ours, peer = (median(samples[side]) for side in ("ours", "peer"))
    detail = {"note": note, "samples": samples, "n": len(samples["ours"])}
    return Row(name, ours, peer, "seconds", at_most=bar, detail=detail)


def _attribution(transformer: ll.Transformer, smoke: bool) -> Row:
    ids = _ids(transformer, SHORT)

    @torch.inference_mode()
    def bare(_: int) -> None:
        transformer.model(ids)

    def attributed(_: int) -> None:
        ll.attribute(transformer, ids, by="head")

    note = "ll.attribute of a short prompt by head (ours); a bare pass (peer); one thread"
    return _row("attribution_time", {"ours": attributed, "peer": bare}, 2.0, note, smoke)


def _patterns(transformer: ll.Transformer, smoke: bool) -> Row:
    ids = _ids(transformer, LONG)
    eager: Any = deepcopy(transformer.model)
    eager.set_attn_implementation("eager")

    @torch.inference_mode()
    def weights(_: int) -> None:
        assert eager(ids, output_attentions=True).attentions

    def patterns(_: int) -> None:
        ll.attention(transformer, ids)

    note = "ll.attention of all heads (ours); an eager pass with output_attentions (peer)"
    return _row("attention_time", {"ours": patterns, "peer": weights}, 1.5, note, smoke)
