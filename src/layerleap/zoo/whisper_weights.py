"""Whisper's weights from a CTranslate2 file, without that library.

In: a model.bin of format 2 or newer. Out: its arrays by name, and a state dict in float32.

The file has a header (version, name, revision) and a count, then the name, shape, type and bytes
of each array. Newer files end with a list of aliases for arrays that are used twice. Projections of
an attention module are stacked in one matrix, the weights of a norm are called gamma and beta, and
there is a zero bias for keys, which Whisper itself does not have.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray[Any, Any]]
DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
OLDEST, WITH_ALIASES = 2, 3
# By module of a layer in the file, the modules of transformers that it holds.
LAYER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
CROSS_ATTENTION = {
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
}


def read_ct2(path: Path) -> Arrays:
    """Every array of the file; those with an alias appear under both names."""
    reader = _Reader(path.read_bytes())
    try:
        version = reader.number("I")
        if version < OLDEST:
            raise ValueError(f"format {version}, expected {OLDEST} or newer")
        reader.text()  # model type
        reader.number("I")  # revision
        arrays = dict(reader.array() for _ in range(reader.number("I")))
        if version >= WITH_ALIASES:
            for _ in range(reader.number("I")):
                alias = reader.text()
                arrays[alias] = arrays[reader.text()]
    except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path.name} is not a readable CTranslate2 file ({error})") from error
    return arrays


class _Reader:
    """Reads one value after another from a byte string; numbers are little-endian."""

    def __init__(self, data: bytes) -> None:
        self.data, self.offset = data, 0

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return int(value)

    def take(self, size: int) -> bytes:
        if self.offset + size > len(self.data):
            raise ValueError("it ends in the middle of an array")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def text(self) -> str:
        return self.take(self.number("H")).rstrip(b"\0").decode()

    def array(self) -> tuple[str, np.ndarray[Any, Any]]:
        name = self.text()
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype = DTYPES[self.number("B")]
        return name, np.frombuffer(self.take(self.number("I")), dtype).reshape(shape)


def n_layers(arrays: Arrays, side: str) -> int:
    """The number of layers of the encoder or the decoder."""
    return sum(key.startswith(f"{side}/layer_") and "ffn/linear_0/bias" in key for key in arrays)


def whisper_state(arrays: Arrays) -> dict[str, Tensor]:
    """The state dict, key by key."""
    modules = {f"encoder/{conv}": [f"model.encoder.{conv}"] for conv in ("conv1", "conv2")}
    embeddings = _tensor(arrays, "decoder/embeddings/weight")
    state = {"model.decoder.embed_tokens.weight": embeddings, "proj_out.weight": embeddings}  # tied
    for side, parts in (("encoder", LAYER), ("decoder", {**LAYER, **CROSS_ATTENTION})):
        positions = _tensor(arrays, f"{side}/position_encodings/encodings")
        state[f"model.{side}.embed_positions.weight"] = positions
        modules[f"{side}/layer_norm"] = [f"model.{side}.layer_norm"]
        for number in range(n_layers(arrays, side)):
            layer = f"model.{side}.layers.{number}"
            for part, names in parts.items():
                modules[f"{side}/layer_{number}/{part}"] = [f"{layer}.{name}" for name in names]
    for source, targets in modules.items():
        ends = ("gamma", "beta") if source.endswith("layer_norm") else ("weight", "bias")
        for name, end in zip(("weight", "bias"), ends, strict=True):
            pieces = _tensor(arrays, f"{source}/{end}").chunk(len(targets))
            for target, piece in zip(targets, pieces, strict=True):
                if name == "weight" or not target.endswith("k_proj"):
                    state[f"{target}.{name}"] = piece.clone()
                elif piece.any():
                    raise ValueError(f"{source} has a bias for keys, but Whisper's keys have none")
    return state


def _tensor(arrays: Arrays, name: str) -> Tensor:
    return torch.tensor(arrays[name].astype(np.float32))
