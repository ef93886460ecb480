"""Small random inputs that any model accepts, for discovery and self-check.

In: a model. Out: keyword arguments for its forward pass.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerleap.errors import ModelRefused
from layerleap.zoo.images import image_shape

READ = ("input_ids", "pixel_values", "input_features")  # main inputs that can be made
N_TOKENS = 7
N_SOUND_STATES = 50  # states of a speech encoder: one second of Whisper's


def vocabulary_size(model: PreTrainedModel) -> int:
    """The number of ids that the input embedding knows."""
    embedding = model.get_input_embeddings()
    size = getattr(embedding, "num_embeddings", None) or model.config.get_text_config().vocab_size
    return int(size)


def accepts(model: PreTrainedModel, name: str) -> bool:
    """True if the forward pass has an argument of that name."""
    return name in inspect.signature(model.forward).parameters


def probe_ids(model: PreTrainedModel, rows: int, n_tokens: int, seed: int) -> Tensor:
    """Random ids that avoid padding, which some families treat differently.

    Tokens whose embedding is 0 are avoided as well: a state of 0 stays 0 through any matrix, so any
    law would hold for it.
    """
    generator = torch.Generator().manual_seed(seed)
    low = 5 if vocabulary_size(model) > 12 else 0
    ids = torch.randint(low, vocabulary_size(model), (rows, n_tokens), generator=generator)
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta or not weight.is_floating_point():
        return ids
    if weight[ids.to(weight.device)].ne(0).any(-1).all():
        return ids
    known = weight[low:].ne(0).any(1).nonzero()[:, 0].cpu() + low
    return known[ids % len(known)] if len(known) else ids


def probe(
    model: PreTrainedModel, *, rows: int = 2, seed: int = 0, n_tokens: int = N_TOKENS
) -> dict[str, Any]:
    """Inputs of `rows` random examples."""
    generator = torch.Generator().manual_seed(seed + 1)
    main = model.main_input_name
    if main not in READ:
        raise ModelRefused(
            f"{type(model).__name__} reads {main}; layerleap can make {', '.join(READ)} for a "
            "model, and read those"
        )
    inputs: dict[str, Any] = {}
    if main == "pixel_values":
        inputs[main] = torch.randn(rows, *image_shape(model.config), generator=generator)
        return prepare(model, inputs)
    ids = probe_ids(model, rows, n_tokens, seed)
    if main == "input_features":
        sound = torch.randn(1, *sound_shape(model.config), generator=generator)
        inputs["encoder_outputs"] = _encoded_sound(model, sound, rows)
        inputs["decoder_input_ids"] = ids
    elif model.config.is_encoder_decoder:
        inputs["input_ids"] = probe_ids(model, rows, n_tokens + 2, seed + 2)
        inputs["decoder_input_ids"] = ids
    else:
        inputs["input_ids"] = ids
        inputs["attention_mask"] = torch.ones_like(ids)
    return prepare(model, inputs)


@torch.no_grad()
def _encoded_sound(model: PreTrainedModel, sound: Tensor, rows: int) -> Any:
    """The encoder's output for the beginning of one sound, repeated for every row.

    Only the decoder is probed, but encoding half a minute of sound takes far longer than decoding
    a few tokens. So the encoder runs once, and the decoder attends to part of its output.
    """
    from transformers.modeling_outputs import BaseModelOutput

    encoder: Any = model.get_encoder()
    features = prepare(model, {"input_features": sound})["input_features"]
    states = encoder(features).last_hidden_state[:, :N_SOUND_STATES]
    return BaseModelOutput(states.expand(rows, -1, -1))


def entry_device(model: PreTrainedModel) -> torch.device:
    """Where inputs go. Offloaded weights appear to be on "meta"; accelerate moves the inputs."""
    return torch.device("cpu") if model.device.type == "meta" else model.device


def prepare(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs on the model's device, in its dtype unless they are integers, and without a cache."""
    placed = {
        name: value.to(entry_device(model), model.dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    return {**placed, "use_cache": False} if accepts(model, "use_cache") else placed


def sound_shape(config: Any) -> tuple[int, int]:
    """Mel bands and frames of the sound that a model expects; `ModelRefused` if unknown."""
    names = ("num_mel_bins", "max_source_positions")
    bands, positions = (getattr(config, name, None) for name in names)
    if bands is None or positions is None:
        raise ModelRefused(
            f"{type(config).__name__} names no {names[0] if bands is None else names[1]}, so no "
            "sound can be made for it; expected a model that reads mel bands in frames of half a "
            "state each, as Whisper does"
        )
    return bands, 2 * positions
