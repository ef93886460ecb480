"""The identity of a model: its name and a fingerprint of its weights.

In: a loaded model. Out: `ModelIdentity`, saved in every artifact and compared on load.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerleap.models.changes import adapters, plain_tensors

SAMPLES = 256  # values per tensor that enter the hash directly
PART = 2**20  # values rounded at a time: the copy stays in the cache of the processor


@dataclass(frozen=True)
class ModelIdentity:
    """Name, revision, class and weight fingerprint of a model."""

    name: str
    revision: str | None
    architecture: str
    fingerprint: str
    parameters: int
    dtype: str
    # By law that was not enforced when it was loaded, what it measured; see `discovery.laws`.
    loosened: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        fields = {key: value for key, value in asdict(self).items() if key != "loosened"}
        return {**fields, "loosened": dict(self.loosened)} if self.loosened else fields


def caveats(model: Mapping[str, Any]) -> list[str]:
    """What limits every result on a model, a sentence each; `model` is an identity as JSON types.

    A bank that is lent to another model says there which one it was fitted on.
    """
    sentences = [
        f"{model['name']} was loaded with laws='loose': law '{law}' does not hold: {detail}."
        for law, detail in model.get("loosened", {}).items()
    ]
    if other := model.get("fitted_on"):
        sentences.append(
            f"The bank was fitted on {other['name']} (weights {str(other['fingerprint'])[:8]}), "
            f"not on {model['name']} (weights {model['fingerprint'][:8]}), which is read."
        )
    return sentences


def identify(model: PreTrainedModel, name: str | None, revision: str | None) -> ModelIdentity:
    """The identity of `model`; the name defaults to where it was loaded from."""
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
    """A hash of every weight: its name, its shape, the sum of all values and some of them.

    Where modules have adapters, also which of them are on. Values are rounded to bfloat16 first, so
    that casting a model between float32 and bfloat16 keeps its fingerprint. The bits are summed as
    integers, so the sum does not depend on the device. The fingerprint identifies a checkpoint; it
    does not protect against forgery.
    """
    digest = hashlib.sha256()
    for name, entry in sorted(model.state_dict().items()):
        plain_name = name.replace("_orig_mod.", "")  # which compiled modules put before it
        for weight in _tensors(entry):
            digest.update(f"{plain_name}{tuple(weight.shape)}".encode())
            digest.update(_sample(weight if weight.device.type != "meta" else _fetch(model, name)))
    if active := adapters(model):
        digest.update(repr(active).encode())
    return digest.hexdigest()[:32]


def _tensors(entry: Any) -> Iterator[Tensor]:
    """The tensors of one entry; quantised modules pack several tensors and settings into one."""
    if isinstance(entry, Tensor):
        for weight in plain_tensors(entry):
            yield weight.int_repr() if weight.is_quantized else weight
    elif isinstance(entry, list | tuple):
        for part in entry:
            yield from _tensors(part)


def _fetch(model: PreTrainedModel, name: str) -> Tensor:
    """A weight that accelerate offloads until its module runs."""
    from accelerate.utils import align_module_device

    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    with align_module_device(owner, torch.device("cpu")):
        return getattr(owner, leaf).detach()


def _sample(weight: Tensor) -> bytes:
    flat = weight.reshape(-1)
    values = _bits(flat[:: max(1, flat.numel() // SAMPLES)]).to(torch.int64).cpu()
    total = torch.tensor([_total(_bits(part)) for part in flat.split(PART)]).sum()
    return values.numpy().tobytes() + total.numpy().tobytes()


def _bits(values: Tensor) -> Tensor:
    """Rounded to bfloat16 and read as integers, unless they are integers."""
    return values.to(torch.bfloat16).view(torch.int16) if values.is_floating_point() else values


def _total(integers: Tensor) -> int:
    """The sum of integers; on the CPU, numpy adds short ones ten times as fast as torch."""
    if integers.device.type == "cpu":
        return int(integers.numpy().sum(dtype="int64"))
    return int(integers.sum(dtype=torch.int64))
