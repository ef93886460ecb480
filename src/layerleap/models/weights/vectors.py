"""Every parameter vector of a block that reads the residual stream or writes to it, as rows.

In: a wrapped model, a block and a kind. Out: (n, d_model), in the basis of the stream.

    ffn.key | ffn.gate, ffn.up     what a neuron reads (one kind, or two in a gated FFN)
    ffn.value                      what a neuron writes
    attn.q, attn.k, attn.v         the columns of W_Q, W_K and W_V, head after head
    attn.o                         the rows of W_O, head after head
"""

import torch
from torch import Tensor

from layerleap.errors import ModelRefused, check_choice
from layerleap.models.facts import KINDS
from layerleap.models.transformer import Transformer
from layerleap.models.weights.heads import heads
from layerleap.models.weights.keys import ffn_keys
from layerleap.models.weights.neurons import feed_forward
from layerleap.models.weights.norms import fold_reader, fold_writer


def kinds(transformer: Transformer, block: int) -> tuple[str, ...]:
    """The kinds of vectors that are verified for a block."""
    return _known(transformer, block)[0]


def refusals(transformer: Transformer, block: int) -> tuple[str, ...]:
    """Why a block lacks the kinds that it lacks; empty if it has all that its parts can have."""
    return _known(transformer, block)[1]


def _known(transformer: Transformer, block: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    known: list[str] = []
    reasons: list[str] = []
    try:
        feed_forward(transformer, block)
        known.append("ffn.value")
        known += ffn_keys(transformer, block).rows
    except ModelRefused as error:
        reasons.append(str(error))
    try:
        attention = heads(transformer, block)
        known += attention.kinds
        reasons += [attention.qk_reason] if attention.qk_reason else []
    except ModelRefused as error:
        reasons.append(str(error))
    return tuple(kind for kind in KINDS if kind in known), tuple(reasons)


@torch.no_grad()
def vectors(transformer: Transformer, block: int, kind: str, *, fold: bool = False) -> Tensor:
    """The vectors of one kind: (n, d_model); a view of the weights where nothing is folded.

    Args:
        transformer: the model.
        block: 1 to n_layers.
        kind: of `KINDS`.
        fold: fold norms in: the one that readers read through, or the final one, that writers are
            read through. A norm after the part itself (Gemma 2) always counts, at a size of 1.
    """
    check_choice(kind, KINDS, "the kind of vectors")
    if kind.startswith("attn."):
        return heads(transformer, block).rows(transformer, kind, fold=fold)
    if kind == "ffn.value":
        rows = feed_forward(transformer, block).written(transformer)
        return fold_writer(transformer, rows) if fold else rows
    keys = ffn_keys(transformer, block)
    if kind not in keys.rows:
        raise ModelRefused(
            f"the FFN of block {block} of {transformer.identity.name} has no {kind}; it has "
            f"{' and '.join(keys.rows)}"
        )
    rows = keys.rows[kind].of(transformer)
    return fold_reader(transformer, keys.norm, rows) if fold else rows
