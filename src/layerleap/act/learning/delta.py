"""Delta: what was learned, as a value: the difference that it makes to some parameters.

In: tensors by parameter name, and the model that they belong to.
Out: a value to add, scale, save, load, apply (`ll.edits.ApplyDelta`) or merge into a copy of the
model. The model itself is never written to.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerleap.errors import BadArtifact, BadSettings, WrongModel
from layerleap.maps.artifact import Artifact, require_identity
from layerleap.models.hooks.forward import hooks_of
from layerleap.models.transformer import Transformer

FORMAT = 1
DELTA = Artifact("delta", "delta.json", "delta.safetensors", FORMAT)


@dataclass(frozen=True, eq=False, repr=False)
class Delta:
    """A change of some parameters of one model.

    The tensors are float32 or wider, whatever the model's dtype, so that many small steps add up.
    `settings` says how it was learned; a sum or multiple of deltas has none.
    """

    tensors: Mapping[str, Tensor]
    model: Mapping[str, Any]  # the identity of the model, as JSON types
    n_layers: int
    d_model: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, transformer: Transformer, tensors: Mapping[str, Tensor], **settings: Any
    ) -> "Delta":
        """A change of parameters of `transformer`; its shapes are checked."""
        transformer.refresh()
        known = dict(transformer.model.named_parameters())
        for name, value in tensors.items():
            if name not in known or known[name].shape != value.shape:
                shape = tuple(known[name].shape) if name in known else "no such parameter"
                raise BadSettings(
                    f"a delta of {tuple(value.shape)} for {name} does not fit "
                    f"{transformer.identity.name}: {shape}"
                )
        identity = transformer.identity.to_dict()
        return cls(dict(tensors), identity, transformer.n_layers, transformer.d_model, settings)

    def __repr__(self) -> str:
        return (
            f"Delta({len(self.tensors)} parameters of {self.model['name']}, norm {self.norm():.4g})"
        )

    def norm(self) -> float:
        """The Euclidean norm of all changes."""
        squares = (value.double().square().sum().item() for value in self.tensors.values())
        return float(sum(squares)) ** 0.5

    def norms(self) -> dict[str, float]:
        """The norm of the change of each parameter."""
        return {name: value.double().norm().item() for name, value in self.tensors.items()}

    def __add__(self, other: "Delta") -> "Delta":
        if not isinstance(other, Delta):
            return NotImplemented
        if self.model.get("fingerprint") != other.model.get("fingerprint"):
            raise WrongModel(
                f"a delta of {self.model['name']} cannot be added to one of {other.model['name']}: "
                "their weights differ"
            )
        tensors = dict(self.tensors)
        for name, value in other.tensors.items():
            tensors[name] = tensors[name] + value if name in tensors else value
        return Delta(tensors, self.model, self.n_layers, self.d_model)

    def __mul__(self, factor: float) -> "Delta":
        tensors = {name: value * factor for name, value in self.tensors.items()}
        return Delta(tensors, self.model, self.n_layers, self.d_model)

    __rmul__ = __mul__

    def __neg__(self) -> "Delta":
        return self * -1.0

    def __sub__(self, other: "Delta") -> "Delta":
        return self + -other

    def check_model(self, transformer: Transformer) -> None:
        """Raise `WrongModel` unless it was learned on exactly these weights."""
        DELTA.check_model(self.model, self.n_layers, self.d_model, transformer)

    @torch.no_grad()
    def values(self, transformer: Transformer) -> dict[str, Tensor]:
        """The parameters after the change, in the dtype of the model."""
        self.check_model(transformer)
        known = dict(transformer.model.named_parameters())
        return {name: changed(known[name], value) for name, value in self.tensors.items()}

    @torch.no_grad()
    def merged(self, transformer: Transformer) -> PreTrainedModel:
        """A copy of the model with the change in its parameters, to save or to use elsewhere."""
        values = self.values(transformer)
        with hooks_of(transformer.model).lock:
            model = deepcopy(transformer.model)
        parameters = dict(model.named_parameters())
        for name, value in values.items():
            parameters[name].copy_(value)
        return model

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the delta atomically; only an earlier delta or an empty folder is replaced."""
        config = {name: getattr(self, name) for name in FIELDS}
        config |= {"model": dict(self.model), "settings": dict(self.settings)}
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.tensors.items()}
        settings = "".join(f"- {key}: {value}\n" for key, value in self.settings.items())
        card = (
            f"# What {self.model['name']} learned\n\nA change of {len(self.tensors)} parameters, "
            f"for `layerleap`: `ll.edits.ApplyDelta(Delta.from_pretrained(folder))`.\n\n{settings}"
        )
        return DELTA.save(folder, config, tensors, card)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, revision: str | None = None, token: str | None = None
    ) -> "Delta":
        """The delta in a folder or hub repository; a damaged one is an error."""
        path, config, tensors = DELTA.load(source, revision=revision, token=token)
        try:
            require_identity(config["model"])
            return cls(tensors, **{name: config[name] for name in FIELDS})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadArtifact(f"{path} does not describe a delta ({error})") from error


FIELDS = ("model", "n_layers", "d_model", "settings")


def changed(parameter: Tensor, delta: Tensor) -> Tensor:
    """A parameter after a change, added in float32 or wider."""
    dtype = torch.promote_types(parameter.dtype, delta.dtype)
    total = parameter.detach().to(dtype) + delta.to(parameter.device, dtype)
    return total.to(parameter.dtype)


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """Float32 or wider, in which small steps add up."""
    return torch.promote_types(parameter.dtype, torch.float32)
