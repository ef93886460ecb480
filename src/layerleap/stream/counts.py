"""How often each token occurs in a text.

In: a wrapped model and any source of text. Out: token ids, the most frequent first.
"""

from itertools import islice
from typing import Any

import torch

from layerleap.errors import BadSettings
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.batches import modality
from layerleap.stream.documents import iter_documents
from layerleap.stream.examples import Sampling, reads_pairs
from layerleap.stream.source import resolve_text

MOST_TOKENS = 2_000_000  # of a text that are counted: enough to know its frequent tokens
DOCUMENTS = 32  # tokenized at a time


def frequent_tokens(
    transformer: Transformer, n: int, text: Any = None, *, progress: Progress = silent
) -> list[int]:
    """The ids of the `n` most frequent tokens of a text, or of all its tokens if there are fewer.

    Tokens that occur equally often are ordered by id. The text is read in pieces, at most two
    million tokens of it.

    Args:
        transformer: its tokenizer.
        n: how many.
        text: anything `iter_documents` accepts; None is the model's default text, or Wikipedia for
            models that do not read plain text.
        progress: called after every piece.
    """
    if n < 1:
        raise BadSettings(f"the number of tokens is {n}; expected 1 or more")
    tokenizer: Any = transformer.need_tokenizer()
    if text is None and (modality(transformer) != "text" or reads_pairs(transformer)):
        text = "wikipedia"
    source, _ = resolve_text(transformer, text, Sampling(), progress)
    documents = iter_documents(source)
    counts, done = torch.zeros(transformer.d_vocab, dtype=torch.long), 0
    while done < MOST_TOKENS and (some := list(islice(documents, DOCUMENTS))):
        encoded = tokenizer(
            [one.text for one in some],
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,  # no warning that an article is longer than the model can read
        )["input_ids"]
        ids = torch.tensor([token for own in encoded for token in own], dtype=torch.long)
        counts += torch.bincount(ids[ids < len(counts)], minlength=len(counts))
        done += len(ids)
        progress("tokens", min(done, MOST_TOKENS), MOST_TOKENS, unit="tokens")
    order = counts.argsort(descending=True, stable=True)
    return order[: min(n, int((counts > 0).sum()))].tolist()
