"""Tiny decoders that generate until the token limit."""

from families import build
from layerleap.models.transformer import Transformer


def wrapped(name="llama", **changes):
    model = build(name, **changes).double()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Transformer.wrap(model)
