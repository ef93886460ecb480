"""Who a model is: the name people use, and a fingerprint of its weights.

In: a loaded model. Out: `Identity`, written into every artefact and compared on load.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLES = 256  # values per tensor; enough to tell checkpoints apart, cheap at any size


@dataclass(frozen=True)
class Identity:
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


def identify(model: PreTrainedModel, name: str | None, revision: str | None) -> Identity:
    """The identity of `model`; the name falls back to where it was loaded from."""
    return Identity(
        name or getattr(model.config, "_name_or_path", "") or type(model).__name__,
        revision or getattr(model.config, "_commit_hash", None),
        type(model).__name__,
        fingerprint(model),
        sum(parameter.numel() for parameter in model.parameters()),
        str(model.dtype).removeprefix("torch."),
    )


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """A hash over evenly spaced values of every weight, its name and its shape.

    Values are rounded to bfloat16 first, so a model cast between float32 and bfloat16 keeps
    its fingerprint. It identifies a checkpoint; it does not protect against forgery.
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
    values = flat[:: max(1, flat.numel() // SAMPLES)].cpu()
    if values.is_floating_point():
        values = values.to(torch.bfloat16).view(torch.int16)
    return values.to(torch.int64).numpy().tobytes()
