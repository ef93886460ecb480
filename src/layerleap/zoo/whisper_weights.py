"""Whisper's weights renamed from CTranslate2 to transformers.

In: the arrays of a CTranslate2 file. Out: a state dict in float32.

The file stores the projections of an attention module stacked in one matrix, calls the weights of
a norm gamma and beta, and has a zero bias for keys, which Whisper itself does not have.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray[Any, Any]]


def n_layers(arrays: Arrays, side: str) -> int:
    """The number of layers of the encoder or the decoder."""
    return sum(key.startswith(f"{side}/layer_") and "ffn/linear_0/bias" in key for key in arrays)


def whisper_state(arrays: Arrays) -> dict[str, Tensor]:
    """The state dict, key by key."""
    keys = _Keys(arrays)
    keys.copy("model.encoder.conv1", "encoder/conv1")
    keys.copy("model.encoder.conv2", "encoder/conv2")
    for side in ("encoder", "decoder"):
        table = f"{side}/position_encodings/encodings"
        keys.state[f"model.{side}.embed_positions.weight"] = keys.tensor(table)
        keys.norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for number in range(n_layers(arrays, side)):
            _layer(keys, f"model.{side}.layers.{number}", f"{side}/layer_{number}")
    embeddings = keys.tensor("decoder/embeddings/weight")
    return {
        **keys.state,
        "model.decoder.embed_tokens.weight": embeddings,
        "proj_out.weight": embeddings,  # tied
    }


def _layer(keys: "_Keys", dst: str, src: str) -> None:
    keys.norm(f"{dst}.self_attn_layer_norm", f"{src}/self_attention/layer_norm")
    keys.split(f"{dst}.self_attn", f"{src}/self_attention/linear_0", "q_proj", "k_proj", "v_proj")
    keys.copy(f"{dst}.self_attn.out_proj", f"{src}/self_attention/linear_1")
    if f"{src}/attention/layer_norm/gamma" in keys.arrays:  # a decoder has cross-attention
        keys.norm(f"{dst}.encoder_attn_layer_norm", f"{src}/attention/layer_norm")
        keys.split(f"{dst}.encoder_attn", f"{src}/attention/linear_0", "q_proj")
        keys.split(f"{dst}.encoder_attn", f"{src}/attention/linear_1", "k_proj", "v_proj")
        keys.copy(f"{dst}.encoder_attn.out_proj", f"{src}/attention/linear_2")
    keys.norm(f"{dst}.final_layer_norm", f"{src}/ffn/layer_norm")
    keys.copy(f"{dst}.fc1", f"{src}/ffn/linear_0")
    keys.copy(f"{dst}.fc2", f"{src}/ffn/linear_1")


class _Keys:
    """Copies the weights of modules under their new names."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.state: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        return torch.tensor(self.arrays[name].astype(np.float32))

    def copy(self, dst: str, src: str, names: tuple[str, str] = ("weight", "bias")) -> None:
        for ours, theirs in zip(("weight", "bias"), names, strict=True):
            self.state[f"{dst}.{ours}"] = self.tensor(f"{src}/{theirs}")

    def norm(self, dst: str, src: str) -> None:
        self.copy(dst, src, ("gamma", "beta"))

    def split(self, dst: str, src: str, *names: str) -> None:
        """Copy projections that are stacked in one matrix."""
        weights, biases = (
            self.tensor(f"{src}/{end}").chunk(len(names)) for end in ("weight", "bias")
        )
        for name, weight, bias in zip(names, weights, biases, strict=True):
            self.state[f"{dst}.{name}.weight"] = weight.clone()
            if name != "k_proj":
                self.state[f"{dst}.{name}.bias"] = bias.clone()
            elif bias.any():
                raise ValueError(f"{src} has a bias for keys, but Whisper's keys have none")
