from .embeddings import (
    dual as dual,
    embedding as embedding,
    gram as gram,
    known_tokens as known_tokens,
    unembedding as unembedding,
)
from .heads import Heads as Heads, all_heads as all_heads, heads as heads
from .keys import Keys as Keys, ffn_keys as ffn_keys
from .neurons import (
    FeedForward as FeedForward,
    feed_forward as feed_forward,
    feed_forwards as feed_forwards,
)
from .vectors import kinds as kinds, refusals as refusals, vectors as vectors
