"""A verified view of a model's weights, in the basis of the residual stream.

In: a wrapped model. Out: the neurons of its FFNs (coefficients, keys, values), the heads of its
attention (queries, keys, values, outputs), and its embeddings; or `ModelRefused` with the reason.

Nothing is taken from names or classes: matrices are those whose recorded inputs and outputs obey
the equations of an FFN or of attention, on a probe, when they are first asked for.
"""

from layerleap.models.facts import KINDS, READS
from layerleap.models.weights.embeddings import (
    dual,
    embedding,
    gram,
    known_tokens,
    unembedding,
)
from layerleap.models.weights.heads import Heads, all_heads, heads
from layerleap.models.weights.keys import Keys, ffn_keys
from layerleap.models.weights.neurons import FeedForward, feed_forward, feed_forwards
from layerleap.models.weights.vectors import kinds, refusals, vectors

__all__ = [
    "KINDS", "READS", "FeedForward", "Heads", "Keys", "all_heads", "dual", "embedding",
    "feed_forward", "feed_forwards", "ffn_keys", "gram", "heads", "kinds",
    "known_tokens", "refusals", "unembedding", "vectors",
]  # fmt: skip
