"""Who a model is: the name people use, and a fingerprint of its weights.

In: a loaded model. Out: `ModelIdentity`, written into every artefact and compared on load.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLES = 256  # values per tensor that are hashed as they are


@dataclass(frozen=True)
class ModelIdentity:
    """Name, revision, class and weight fingerprint of a model."""

    name: str
    revision: str | None
    architecture: str
    fingerprint: str
    parameters: int
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def identify(model: PreTrainedModel, name: str | None, revision: str | None) -> ModelIdentity:
    """The identity of `model`; the name falls back to where it was loaded from."""
    return ModelIdentity(
        name or getattr(model.config, "_name_or_path", "") or type(model).__name__,
        revision or getattr(model.config, "_commit_hash", None),
        type(model).__name__,
        fingerprint(model),
        sum(parameter.numel() for parameter in model.parameters()),
        str(model.dtype).removeprefix("torch."),
    )


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """A hash over every weight: its name, shape, sums over all of it and some of its values.

    Values are rounded to bfloat16 first, so a model cast between float32 and bfloat16 keeps
    its fingerprint. Sums are of the bits as integers, so they do not depend on the device.
    It identifies a checkpoint; it does not protect against forgery.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(model.state_dict().items()):
        for weight in _tensors(entry):
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            digest.update(_sample(weight if weight.device.type != "meta" else _fetch(model, name)))
    return digest.hexdigest()[:32]


def _tensors(entry: Any) -> Iterator[Tensor]:
    """The tensors of one entry; quantised modules pack several, and settings, into one."""
    if isinstance(entry, Tensor):
        yield entry.int_repr() if entry.is_quantized else entry
    elif isinstance(entry, list | tuple):
        for part in entry:
            yield from _tensors(part)


def _fetch(model: PreTrainedModel, name: str) -> Tensor:
    """A weight that accelerate keeps elsewhere until its module runs."""
    from accelerate.utils import align_module_device

    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    with align_module_device(owner, torch.device("cpu")):
        return getattr(owner, leaf).detach()


def _sample(weight: Tensor) -> bytes:
    flat = weight.reshape(-1)
    if flat.is_floating_point():
        flat = flat.to(torch.bfloat16).view(torch.int16)
    some = flat[:: max(1, flat.numel() // SAMPLES)].to(torch.int64).cpu()
    total = flat.sum(dtype=torch.int64).cpu()
    return some.numpy().tobytes() + total.numpy().tobytes()
