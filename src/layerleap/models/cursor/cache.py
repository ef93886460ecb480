"""A cache whose layers hold keys and values of different lengths.

In: what blocks append. Out: a cache that the library's models take for one of their own; it tells
them that the text goes on from where the pass under way begins, whatever each layer holds.
"""

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from layerleap.errors import BadSettings


class KeysStored(Exception):
    """Raised inside a block once its keys and values are kept, if nothing else is wanted."""


class Layer(DynamicLayer):
    """Keys and values in a buffer with room to spare: appending copies nothing that is there."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._room: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; returns all there is."""
        total = self.length + key_states.shape[-2]
        if not self._room or total > self._room[0].shape[-2]:
            self._grow((key_states, value_states), total)
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., self.length : total, :] = new
        self.set_length(total)
        return self.keys, self.values

    def _grow(self, new: tuple[Tensor, Tensor], total: int) -> None:
        size = max(64, 2 * total)
        rooms = tuple(n.new_empty(*n.shape[:-2], size, n.shape[-1]) for n in new)
        for room, old in zip(rooms, self._room, strict=False):
            room[..., : self.length, :] = old[..., : self.length, :]
        self.dtype, self.device, self.is_initialized = new[0].dtype, new[0].device, True
        self._room = rooms

    def set_length(self, length: int) -> None:
        """Keep the first `length` positions."""
        self.length = length
        if self._room:
            self.keys, self.values = (room[..., :length, :] for room in self._room)

    def gather(self, start: int, places: Tensor) -> None:
        """What lies at start + places moves to start, start + 1, ...; all else from there on goes.

        Args:
            start: where the places are counted from.
            places: rising.
        """
        for room in self._room:
            room[..., start : start + len(places), :] = room[..., start + places, :]
        self.set_length(start + len(places))

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
        self.begin = 0  # where the pass under way begins, as the model is told
        self.keys_only = False  # stop a block as soon as its keys and values are kept

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Where the pass under way begins."""
        return self.begin

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys a mask is about, and where they begin."""
        return self.begin + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to one layer."""
        found = super().update(*args, **kwargs)
        if self.keys_only:
            raise KeysStored
        return found

    def take(self, other: Cache) -> None:
        """Take over keys and values of one text, all layers equally long."""
        if len(other.layers) != len(self.layers):
            raise BadSettings(
                f"a cache of {len(other.layers)} layers was handed over; this model has "
                f"{len(self.layers)}"
            )
        for own, layer in zip(self.layers, other.layers, strict=True):
            keys, values = layer.keys, layer.values
            whole = keys is not None and keys.shape[-2] == layer.get_seq_length()
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or not whole:
                raise BadSettings(
                    f"a {type(layer).__name__} that holds {0 if keys is None else keys.shape[-2]} "
                    f"of {layer.get_seq_length()} positions was handed over; a DynamicCache with "
                    "all of them was wanted (a sliding window has dropped some once it is full)"
                )
            if keys.shape[0] != 1:
                raise BadSettings(
                    f"a cache of {keys.shape[0]} texts was handed over; decode them one by one"
                )
            own.update(keys, values)

    def give(self, other: Cache) -> None:
        """Leave what is here in a cache of the library's own, in place of what it had."""
        while len(other.layers) < len(self.layers) and other.layer_class_to_replicate is not None:
            other.layers.append(other.layer_class_to_replicate())  # made when first used
        for own, layer in zip(self.layers, other.layers, strict=True):
            layer.reset()
            if own.keys is not None and own.values is not None:
                layer.update(own.keys.clone(), own.values.clone())
