"""The tokens of a text: the most frequent ones, and windows of one length to train on.

In: a wrapped model, for its tokenizer, and any source of text. Out: token ids.
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.batches import modality
from layerleap.stream.documents import iter_documents
from layerleap.stream.examples import Sampling, reads_pairs
from layerleap.stream.source import resolve_text
from layerleap.stream.split import Side, is_held_out, on_side

MOST_TOKENS = 2_000_000  # of a text that are counted: enough to know its frequent tokens
DOCUMENTS = 32  # tokenized at a time


def frequent_tokens(
    transformer: Transformer, n: int, text: Any = None, *, progress: Progress = silent
) -> list[int]:
    """The ids of the `n` most frequent tokens of a text, or of all its tokens if there are fewer.

    Tokens that occur equally often are ordered by id. At most two million tokens of the text are
    read. None is the model's default text, or Wikipedia for models that do not read plain text.
    """
    if n < 1:
        raise BadSettings(f"the number of tokens is {n}; expected 1 or more")
    tokenizer: Any = transformer.need_tokenizer()
    if text is None and (modality(transformer) != "text" or reads_pairs(transformer)):
        text = "wikipedia"
    source, _ = resolve_text(transformer, text, Sampling(), progress)
    documents = iter_documents(source)
    counts, done = torch.zeros(transformer.d_vocab, dtype=torch.long), 0
    while done < MOST_TOKENS and (chunk := list(islice(documents, DOCUMENTS))):
        encoded = tokenizer(
            [document.text for document in chunk],
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,  # no warning that an article is longer than the model can read
        )["input_ids"]
        ids = torch.tensor([token for text in encoded for token in text], dtype=torch.long)
        counts += torch.bincount(ids[ids < len(counts)], minlength=len(counts))
        done += len(ids)
        progress("tokens", min(done, MOST_TOKENS), MOST_TOKENS, unit="tokens")
    order = counts.argsort(descending=True, stable=True)
    return order[: min(n, int((counts > 0).sum()))].tolist()


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
