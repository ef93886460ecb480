"""A text as windows of tokens of one length, to train on and to test with.

In: documents of one side of the split. Out: their tokens in a row, and windows of them.
"""

from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadText
from layerleap.models.transformer import Transformer
from layerleap.stream.documents import iter_documents
from layerleap.stream.split import Side, is_held_out, on_side


def token_stream(
    transformer: Transformer,
    text: Any,
    n_tokens: int,
    *,
    side: Side = "fit",
    held_out: float = 0.25,
    seed: int = 0,
    field: str = "text",
) -> Tensor:
    """The first `n_tokens` tokens of the documents of one side, each ended by the end token."""
    tokenizer = transformer.need_tokenizer()
    end = tokenizer.eos_token_id
    ids: list[int] = []
    if n_tokens == 0:
        return torch.tensor(ids, dtype=torch.long)
    for document in iter_documents(text, field=field):
        if not on_side(side, is_held_out(document, share=held_out, seed=seed)):
            continue
        # A whole article is longer than the limit that the tokenizer would warn about.
        ids += tokenizer(document.text, verbose=False)["input_ids"]
        ids += [] if end is None else [end]
        if len(ids) >= n_tokens:
            break
    return torch.tensor(ids[:n_tokens], dtype=torch.long)


def windows(stream: Tensor, width: int) -> Tensor:
    """A stream cut into windows, without the rest: (window, width)."""
    if len(stream) < width:
        raise BadText(
            f"the text has {len(stream)} tokens to train on, fewer than one window of {width}; "
            "give more text, or fewer tokens per window"
        )
    return stream[: len(stream) // width * width].reshape(-1, width)
