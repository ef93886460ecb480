"""TaskProbe: predict from a single state which rank is being decided.

In: saturation layers, and the states of the same rows at all layers.
Out: `TaskProbe`, a multinomial logistic regression on standardised states. It is fitted by
scikit-learn and stored as plain tensors: using or loading it needs neither scikit-learn nor pickle.

One probe serves all layers and does not know the layer. States come from the residual stream,
before the final norm, either unchanged ("raw") or scaled to length sqrt(d_model) ("unit"), as an
RMS norm without weights does.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, NotFinite, check_choice
from layerleap.extras import learn_library
from layerleap.lens.probes.cells import Cells, CellSampling, cells_of
from layerleap.lens.saturation import Saturation
from layerleap.maps.artifact import Artifact, require_identity
from layerleap.models.transformer import Transformer
from layerleap.short_repr import ShortRepr

# Inverse of the penalty. States have hundreds of features and there are few cells: with a much
# smaller penalty the probe memorises cells, and takes ten times as long to fit.
STRENGTH = 0.01
ARRAYS = ("mean", "scale", "coefficients", "intercepts")


@dataclass(frozen=True, eq=False, repr=False)
class Softmax(ShortRepr):
    """A multinomial logistic regression on standardised features, in float64."""

    mean: Tensor  # (feature,)
    scale: Tensor  # (feature,)
    coefficients: Tensor  # (task, feature)
    intercepts: Tensor  # (task,)

    def __post_init__(self) -> None:
        tasks, width = self.coefficients.shape if self.coefficients.dim() == 2 else (0, 0)
        shapes = {"mean": (width,), "scale": (width,), "intercepts": (tasks,)}
        for name, shape in shapes.items():
            if tasks < 2 or tuple(getattr(self, name).shape) != shape:
                raise BadSettings(f"{name} of a probe with {tasks} tasks must have shape {shape}")
        if not all(getattr(self, name).isfinite().all() for name in ARRAYS):
            raise BadSettings("this probe contains NaN or infinite numbers; fit it again")

    def probabilities(self, x: Tensor) -> Tensor:
        """The probability of each task: (row, feature) -> (row, task)."""
        weight, bias = (part.to(x.device) for part in self._folded)
        return torch.addmm(bias, x.to(weight.dtype), weight).softmax(-1)

    @cached_property
    def _folded(self) -> tuple[Tensor, Tensor]:
        """Standardisation and regression as one product, because it runs at every layer."""
        weight = self.coefficients.contiguous() / self.scale
        # A copy: how a product rounds depends on where in memory its factors begin, and those of a
        # loaded probe may begin anywhere.
        return weight.T.contiguous(), self.intercepts - weight @ self.mean.clone()

    @classmethod
    def fit(cls, x: Tensor, task: Tensor, n_tasks: int, strength: float) -> "Softmax":
        """A regression of tasks 1 to n_tasks on rows of features; every task must occur."""
        linear = learn_library("sklearn.linear_model")
        scaling = learn_library("sklearn.preprocessing")
        pipeline = learn_library("sklearn.pipeline").make_pipeline(
            scaling.StandardScaler(), linear.LogisticRegression(C=strength, max_iter=2000)
        )
        # The matrices are small: more threads cost more time than they save.
        with learn_library("threadpoolctl").threadpool_limits(1):
            pipeline.fit(x.numpy(), task.numpy())
        scaler, model = pipeline[0], pipeline[1]
        weight, bias = torch.from_numpy(model.coef_), torch.from_numpy(model.intercept_)
        if n_tasks == 2:  # scikit-learn then stores only the log odds of the second task
            weight, bias = (torch.cat([torch.zeros_like(one), one]) for one in (weight, bias))
        return cls(torch.from_numpy(scaler.mean_), torch.from_numpy(scaler.scale_), weight, bias)


def require_strength(strength: float) -> None:
    """Refuse an invalid penalty."""
    if not 0 < strength < float("inf"):
        raise BadSettings(f"strength {strength} is invalid; expected a number above 0")


Space = Literal["raw", "unit"]
PROBE = Artifact("probe", "probe.json", "probe.safetensors", 1)
FIELDS = ("model", "n_layers", "lens", "space", "settings", "data", "quality")
EVIDENCE = "task"  # the name of its output among the evidence of exit rules


class States(Protocol):
    """States of many rows at all layers, read a few at a time, like `stats.SavedStates`."""

    n_layers: int
    d_model: int
    model: dict[str, Any]

    def __len__(self) -> int:
        """The number of rows."""

    @property
    def documents(self) -> Tensor:
        """The document of each row: (row,)."""

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        """h[layers[i]] of row rows[i]: (cell, d_model)."""


def require_aligned(saturation: Saturation, states: States) -> None:
    """Refuse states of other rows, whose labels would be wrong without any error."""
    same = len(saturation.documents) == len(states) and torch.equal(
        saturation.documents, states.documents
    )
    if not same or saturation.n_layers != states.n_layers:
        raise BadSettings(
            f"saturation of {len(saturation.documents)} rows and {saturation.n_layers} layers does "
            f"not match states of {len(states)} rows and {states.n_layers} layers; give both for "
            "the same rows in the same order"
        )


def in_space(h: Tensor, space: Space) -> Tensor:
    """States as input of the probe, float64."""
    check_choice(space, Space, "space")
    h = h.double()
    if space == "raw":
        return h
    length = h.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return h * (h.shape[-1] ** 0.5 / length)


@dataclass(frozen=True, eq=False)
class TaskProbe:
    """A fitted probe, the model it belongs to, and the layers it was trained on."""

    weights: Softmax
    layers: tuple[int, ...]
    n_layers: int
    model: Mapping[str, Any]  # identity, as JSON types
    lens: str  # the lens used to read saturation
    space: Space = "raw"
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    quality: tuple[Mapping[str, Any], ...] = ()  # held-out scores, if measured

    def __post_init__(self) -> None:
        check_choice(self.space, Space, "space")
        layers = self.layers
        if not layers or min(layers) < 0 or max(layers) > self.n_layers:
            raise BadSettings(f"layers {layers} do not fit a model with {self.n_layers} layers")

    @property
    def n_tasks(self) -> int:
        """The number of tasks."""
        return len(self.weights.intercepts)

    @property
    def d_model(self) -> int:
        """The width of the states."""
        return len(self.weights.mean)

    def __repr__(self) -> str:
        low, high = min(self.layers), max(self.layers)
        return (
            f"TaskProbe({self.n_tasks} tasks of {self.model['name']}, lens {self.lens}, "
            f"trained on {len(self.layers)} layers from {low} to {high})"
        )

    @classmethod
    def fit(
        cls,
        saturation: Saturation,
        states: States,
        *,
        sampling: CellSampling | None = None,
        strength: float = STRENGTH,
        space: Space = "raw",
        quality: Iterable[Mapping[str, Any]] = (),
    ) -> "TaskProbe":
        """A probe trained on all rows given; use `score_probe` to see how good it is.

        Args:
            states: the states of the same rows in the same order.
            sampling: which (row, layer) to use.
            strength: inverse of the penalty on coefficients, scikit-learn's C.
            quality: the rows of `score_probe`, to save with the probe.
        """
        sampling = sampling or CellSampling()
        require_strength(strength)
        require_aligned(saturation, states)
        cells = cells_of(saturation, sampling)
        x = features(states, cells, space)
        weights = Softmax.fit(x, cells.task, cells.n_tasks, strength)
        documents = saturation.documents[cells.row].unique()
        data = {"cells": len(cells), "rows": len(cells.row.unique()), "documents": len(documents)}
        settings = {**asdict(sampling), "strength": strength}
        origin = cells.layers, states.n_layers, states.model, saturation.lens
        return cls(weights, *origin, space, settings, data, tuple(quality))

    def probabilities(self, h: Tensor) -> Tensor:
        """The probability that each rank is being decided: (row, d_model) -> (row, task)."""
        if h.shape[-1] != self.d_model:
            raise BadSettings(f"got states of width {h.shape[-1]}; expected {self.d_model}")
        return self.weights.probabilities(in_space(h, self.space))

    def later(self, h: Tensor, layer: int) -> Tensor:
        """The probability that rank 2 or later is being decided: (row, d_model) -> (row,).

        0 at layers the probe was not trained on, where its output is meaningless; the rule `Task`
        does not exit there.
        """
        if layer not in self.layers:
            return torch.zeros(len(h), dtype=torch.float64, device=h.device)
        return 1 - self.probabilities(h)[:, 0]

    def evidence(self, states: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Extra evidence for the rule `Task`, from states by layer."""
        columns = [self.later(h, layer) for layer, h in sorted(states.items())]
        return {EVIDENCE: torch.stack([column.cpu() for column in columns], 1)}

    def check_model(self, transformer: Transformer) -> None:
        """Raise `WrongModel` unless the probe was fitted on exactly these weights."""
        PROBE.check_model(self.model, self.n_layers, self.d_model, transformer)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the probe atomically; only an earlier probe or an empty folder is replaced."""
        config = {key: getattr(self, key) for key in FIELDS} | {"layers": list(self.layers)}
        tensors = {name: getattr(self.weights, name).contiguous() for name in ARRAYS}
        return PROBE.save(folder, config, tensors, _model_card(self))

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        transformer: Transformer | None = None,
        *,
        revision: str | None = None,
        token: str | None = None,
    ) -> "TaskProbe":
        """The probe in a folder or hub repository; a damaged one is an error.

        Args:
            transformer: the model to use it on, which must be the one it was fitted on. Without it,
                call `check_model` yourself.
        """
        path, config, tensors = PROBE.load(source, revision=revision, token=token)
        try:
            require_identity(config["model"])
            fields = {key: config[key] for key in FIELDS}
            fields |= {"layers": tuple(config["layers"]), "quality": tuple(config["quality"])}
            probe = cls(Softmax(**{name: tensors[name] for name in ARRAYS}), **fields)
        except (KeyError, TypeError, ValueError, AttributeError, BadSettings) as error:
            raise BadArtifact(f"{path} does not describe a probe ({error})") from error
        if transformer is not None:
            probe.check_model(transformer)
        return probe


def features(states: States, cells: Cells, space: Space) -> Tensor:
    """The states of all cells: (cell, d_model), float64."""
    x = in_space(states.cells(cells.row, cells.layer), space)
    if not x.isfinite().all():
        raise NotFinite("cannot train on NaN or infinite states; check the rows")
    return x


CARD = """---
library_name: layerleap
tags:
- layerleap
- interpretability
---

# Saturation task probe for {name}

A logistic regression that predicts from one hidden state which rank of the output is being \
decided, as in ["Looking Beyond the Top-1"](https://arxiv.org/abs/2410.20210).

`{probe!r}`

## Training

{details}

## Evaluation

{scores}
"""


def _model_card(probe: TaskProbe) -> str:
    details = {"model": probe.model["name"], "lens": probe.lens, "space": probe.space}
    details |= {**probe.data, **probe.settings}
    scores = []
    for row in probe.quality:
        task = "" if row["task"] is None else f" of task {row['task']}"
        scores.append(f"- {row['measure']}{task}: {row['value']:.3f}, chance {row['chance']:g}")
    return CARD.format(
        name=probe.model["name"],
        probe=probe,
        details="\n".join(f"- {key}: {value}" for key, value in details.items()),
        scores="\n".join(scores) or "Not evaluated on held-out documents.",
    )
