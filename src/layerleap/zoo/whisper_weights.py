"""The key map of Whisper: from a CTranslate2 file's names to those of transformers.

In: the arrays of the file. Out: a state dict in float32.

In the file the projections of an attention are stored as one matrix, on top of each other; norms
have gamma and beta; keys have a bias of zeros, which Whisper's own do not have.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray[Any, Any]]


def n_layers(arrays: Arrays, side: str) -> int:
    """How many layers the encoder or the decoder has."""
    return sum(key.startswith(f"{side}/layer_") and "ffn/linear_0/bias" in key for key in arrays)


def whisper_state(arrays: Arrays) -> dict[str, Tensor]:
    """The state dict, key by key."""
    keys = _Keys(arrays)
    keys.copy("model.encoder.conv1", "encoder/conv1")
    keys.copy("model.encoder.conv2", "encoder/conv2")
    for side in ("encoder", "decoder"):
        table = f"{side}/position_encodings/encodings"
        keys.found[f"model.{side}.embed_positions.weight"] = keys.tensor(table)
        keys.norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for number in range(n_layers(arrays, side)):
            _layer(keys, f"model.{side}.layers.{number}", f"{side}/layer_{number}")
    words = keys.tensor("decoder/embeddings/weight")
    return {
        **keys.found,
        "model.decoder.embed_tokens.weight": words,
        "proj_out.weight": words,  # one matrix, used twice
    }


def _layer(keys: "_Keys", to: str, of: str) -> None:
    keys.norm(f"{to}.self_attn_layer_norm", f"{of}/self_attention/layer_norm")
    keys.split(f"{to}.self_attn", f"{of}/self_attention/linear_0", "q_proj", "k_proj", "v_proj")
    keys.copy(f"{to}.self_attn.out_proj", f"{of}/self_attention/linear_1")
    if f"{of}/attention/layer_norm/gamma" in keys.arrays:  # a decoder also attends to the sound
        keys.norm(f"{to}.encoder_attn_layer_norm", f"{of}/attention/layer_norm")
        keys.split(f"{to}.encoder_attn", f"{of}/attention/linear_0", "q_proj")
        keys.split(f"{to}.encoder_attn", f"{of}/attention/linear_1", "k_proj", "v_proj")
        keys.copy(f"{to}.encoder_attn.out_proj", f"{of}/attention/linear_2")
    keys.norm(f"{to}.final_layer_norm", f"{of}/ffn/layer_norm")
    keys.copy(f"{to}.fc1", f"{of}/ffn/linear_0")
    keys.copy(f"{to}.fc2", f"{of}/ffn/linear_1")


class _Keys:
    """Copies modules from one naming to the other."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.found: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        return torch.tensor(self.arrays[name].astype(np.float32))

    def copy(self, to: str, of: str, names: tuple[str, str] = ("weight", "bias")) -> None:
        for ours, theirs in zip(("weight", "bias"), names, strict=True):
            self.found[f"{to}.{ours}"] = self.tensor(f"{of}/{theirs}")

    def norm(self, to: str, of: str) -> None:
        self.copy(to, of, ("gamma", "beta"))

    def split(self, to: str, of: str, *names: str) -> None:
        """Projections that are stored as one."""
        weights, biases = (
            self.tensor(f"{of}/{end}").chunk(len(names)) for end in ("weight", "bias")
        )
        for name, weight, bias in zip(names, weights, biases, strict=True):
            self.found[f"{to}.{name}.weight"] = weight.clone()
            if name != "k_proj":
                self.found[f"{to}.{name}.bias"] = bias.clone()
            elif bias.any():
                raise ValueError(f"{of} has a bias for keys, which Whisper does not know")
