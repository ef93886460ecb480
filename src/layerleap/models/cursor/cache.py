"""A cache whose layers hold keys and values of different lengths.

In: what blocks append. Out: a cache that the models of transformers accept as one of their own; it
tells them that the text continues from where the current pass begins, whatever each layer holds.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from layerleap.errors import BadSettings


class KeysStored(Exception):
    """Raised inside a block once its keys and values are stored, if nothing else is needed."""


class Layer(DynamicLayer):
    """Keys and values in a buffer with room to spare: appending copies nothing that is there."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._buffers: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; returns all keys and values."""
        total = self.length + key_states.shape[-2]
        if not self._buffers or total > self._buffers[0].shape[-2]:
            self._grow((key_states, value_states), total)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., self.length : total, :] = new
        self.set_length(total)
        return self.keys, self.values

    def _grow(self, new: tuple[Tensor, Tensor], total: int) -> None:
        size = max(64, 2 * total)
        buffers = tuple(n.new_empty(*n.shape[:-2], size, n.shape[-1]) for n in new)
        for buffer, old in zip(buffers, self._buffers, strict=False):
            buffer[..., : self.length, :] = old[..., : self.length, :]
        self.dtype, self.device, self.is_initialized = new[0].dtype, new[0].device, True
        self._buffers = buffers

    def set_length(self, length: int) -> None:
        """Keep the first `length` positions."""
        self.length = length
        if self._buffers:
            self.keys, self.values = (buffer[..., :length, :] for buffer in self._buffers)

    def gather(self, start: int, offsets: Tensor) -> None:
        """Move start + offsets (rising) to start, start + 1, ...; forget what else follows."""
        for buffer in self._buffers:
            buffer[..., start : start + len(offsets), :] = buffer[..., start + offsets, :]
        self.set_length(start + len(offsets))

    def get_seq_length(self) -> int:
        """How many positions there are."""
        return self.length


class RaggedCache(DynamicCache):
    """`layers[l]` belongs to the block that makes h[l + 1]."""

    layers: list[Layer]

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.layers = [Layer() for _ in range(n_layers)]
        self.begin = 0  # where the current pass begins, as the model is told
        self.keys_only = False  # stop a block as soon as its keys and values are stored
        self.cursor: Any = None  # during a pass, the cursor that knows which rows it runs

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Where the current pass begins."""
        return self.begin

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys a mask covers, and where they begin."""
        return self.begin + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to one layer."""
        keys, values = super().update(*args, **kwargs)
        if self.keys_only:
            raise KeysStored
        return keys, values

    def take(self, other: Cache) -> None:
        """Take over keys and values of one text, all layers equally long."""
        if len(other.layers) != len(self.layers):
            raise BadSettings(
                f"got a cache of {len(other.layers)} layers; this model has {len(self.layers)}"
            )
        for mine, layer in zip(self.layers, other.layers, strict=True):
            keys, values = layer.keys, layer.values
            is_whole = keys is not None and keys.shape[-2] == layer.get_seq_length()
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or not is_whole:
                raise BadSettings(
                    f"got a {type(layer).__name__} with {0 if keys is None else keys.shape[-2]} "
                    f"of {layer.get_seq_length()} positions; expected a DynamicCache with all of "
                    "them (a sliding window drops some once it is full)"
                )
            if keys.shape[0] != 1:
                raise BadSettings(f"got a cache of {keys.shape[0]} texts; decode them one by one")
            mine.update(keys, values)

    def give(self, other: Cache) -> None:
        """Copy everything into one of transformers' caches, replacing what it had."""
        while len(other.layers) < len(self.layers) and other.layer_class_to_replicate is not None:
            other.layers.append(other.layer_class_to_replicate())  # made when first used
        for mine, layer in zip(self.layers, other.layers, strict=True):
            layer.reset()
            if mine.keys is not None and mine.values is not None:
                layer.update(mine.keys.clone(), mine.values.clone())
