"""Have the weights of a model changed? A mark of them that takes milliseconds.

In: a model. Out: a value that differs from an earlier one if the weights changed since.

`Transformer.refresh` compares marks before anything fitted is applied, and recomputes the identity
if they differ. A mark holds where each weight is, how often PyTorch saw it change in place, some
of its values, and which adapters are on. Writing to `.data` is not counted by PyTorch, so it shows
only in the sampled values. They meet every row and every column of a matrix: a neuron or a token
set to zero is noticed, single entries may not be. The fingerprint of the identity sees every value.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer

T = TypeVar("T")
PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True)
class Mark:
    """The weights of a model at one time; equal if they did not change and were not moved."""

    tensors: tuple[tuple[Any, ...], ...]
    samples: bytes
    adapters: tuple[Any, ...]


@torch.no_grad()
def mark(model: nn.Module) -> Mark:
    """The mark of the weights that the model has now."""
    tensors, samples = [], {}
    for name, weight in _weights(model):
        version = None if weight.is_inference() else weight._version
        place = None if weight.is_meta else weight.data_ptr()
        tensors.append((name, weight.shape, weight.dtype, weight.device, place, version))
        if not weight.is_meta and (place, weight.shape) not in samples:  # else tied to another
            samples[place, weight.shape] = _sample(weight)
    by_device: dict[torch.device, list[Tensor]] = {}
    for sample in samples.values():
        by_device.setdefault(sample.device, []).append(sample)
    values = b"".join(torch.cat(group).cpu().numpy().tobytes() for group in by_device.values())
    return Mark(tuple(tensors), values, adapters(model))


def adapters(model: nn.Module) -> tuple[Any, ...]:
    """Which adapters are on, merged and how strong, by module; empty for a model without any.

    Modules with adapters, such as those of PEFT, switch between them without changing a weight.
    """
    states: list[Any] = []
    kinds = {type(module) for module in model.modules()}
    switching = tuple(kind for kind in kinds if hasattr(kind, "active_adapters"))
    for path, module in model.named_modules() if switching else ():
        active = module.active_adapters if isinstance(module, switching) else None
        if isinstance(active, list | tuple | str):
            names = ("disable_adapters", "merged_adapters", "scaling")
            state = [(name, str(getattr(module, name, None))) for name in names]
            states.append((path, str(active), *state))
    return tuple(states)


class Known(Generic[T]):
    """What was found out about wrapped models, forgotten once `refresh` gave them a new identity.

    Adapters and casts change more than numbers: a matrix that gave a module's output may no longer.
    All wrappers of one model share it, so nothing in it may refer to the model.
    """

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[nn.Module, tuple[Any, T]] = WeakKeyDictionary()

    def of(self, transformer: "Transformer", find: Callable[[], T]) -> T:
        """What is known about this model; found now, if nothing is or the identity changed."""
        entry = self._entries.get(transformer.model)
        key = transformer.identity, transformer.blocks, transformer.tail
        if entry is None or entry[0] != key:
            entry = self._entries[transformer.model] = key, find()
        return entry[1]


def plain_tensors(weight: Tensor) -> Iterator[Tensor]:
    """The weight itself, or the tensors that a subclass keeps, such as integers and scales."""
    if type(weight) not in PLAIN and is_traceable_wrapper_subclass(weight):
        names, _ = weight.__tensor_flatten__()
        for name in names:
            yield from plain_tensors(getattr(weight, name))
    else:
        yield weight


def _weights(model: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Everything that is saved with the model, numbered in order."""
    number = 0
    for module in model.modules():
        weights: list[Tensor | None] = [*module._parameters.values()]
        if module._buffers:
            unsaved = module._non_persistent_buffers_set
            weights += [value for name, value in module._buffers.items() if name not in unsaved]
        for weight in weights:
            if weight is not None:
                for tensor in plain_tensors(weight):
                    yield number, tensor
                    number += 1


def _sample(weight: Tensor) -> Tensor:
    """At least one value of every row and of every column, read with one stride."""
    size, columns = weight.numel(), weight.shape[-1] if weight.dim() > 1 else 1
    step = max(1, min(columns, size // max(1, columns)))
    while gcd(step, columns) > 1:  # else some columns are never met
        step -= 1
    flat = weight if weight.is_contiguous() else weight.reshape(-1)
    values = flat.as_strided((-(-size // step),), (step,))  # in one call
    return values if values.dtype == torch.float32 else values.to(torch.float32)
