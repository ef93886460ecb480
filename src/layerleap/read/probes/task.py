"""TaskProbe: which rank is being decided, read off a single state.

In: saturation layers, and the states of the same rows at all layers.
Out: `TaskProbe`, a multinomial logistic regression on standardised states, fitted by scikit-learn
and kept as plain arrays: using or loading one needs neither scikit-learn nor a pickle.

One probe serves all layers and is not told the layer. States are those of the residual stream, so
before the final norm, and in one space everywhere: as they are ("raw"), or each stretched to
length sqrt(d_model) ("unit"), as an RMS norm without weights would do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from layerleap.errors import BadArtifact, BadSettings, NotFinite
from layerleap.maps.artifact import Artifact, require_identity
from layerleap.models.transformer import Transformer
from layerleap.read.probes.cells import Cells, CellSampling, cells_of
from layerleap.read.probes.softmax import ARRAYS, STRENGTH, Softmax, require_strength
from layerleap.read.saturation import Saturation

Space = Literal["raw", "unit"]
PROBE = Artifact("probe", "probe.json", "probe.safetensors", 1)
KEPT = ("model", "n_layers", "lens", "space", "settings", "data", "quality")
EVIDENCE = "task"  # what its answers are called among the evidence of exit rules


class States(Protocol):
    """States of many rows at all layers, of which only a few are held at a time: `stats.Rows`."""

    n_layers: int
    d_model: int
    model: dict[str, Any]

    def __len__(self) -> int:
        """How many rows."""

    @property
    def documents(self) -> Tensor:
        """(row,)."""

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        """h[layers[i]] of row rows[i]: (cell, d_model)."""


def require_aligned(saturation: Saturation, states: States) -> None:
    """Refuse states of other rows: labels would then belong to other states, silently."""
    same = len(saturation.documents) == len(states) and torch.equal(
        saturation.documents, states.documents
    )
    if not same or saturation.n_layers != states.n_layers:
        raise BadSettings(
            f"saturation layers of {len(saturation.documents)} rows and {saturation.n_layers} "
            f"layers do not belong to states of {len(states)} rows and {states.n_layers} layers; "
            "give both of the same rows in the same order"
        )


def in_space(h: Tensor, space: Space) -> Tensor:
    """States as the probe takes them, float64."""
    h = h.double()
    if space == "raw":
        return h
    length = h.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return h * (h.shape[-1] ** 0.5 / length)


@dataclass(frozen=True, eq=False)
class TaskProbe:
    """A fitted probe, the model it belongs to, and the layers that it was trained on."""

    weights: Softmax
    layers: tuple[int, ...]
    n_layers: int
    model: Mapping[str, Any]  # identity, as JSON types
    lens: str  # through which saturation was read
    space: Space = "raw"
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    quality: tuple[Mapping[str, Any], ...] = ()  # held-out scores, if they were measured

    def __post_init__(self) -> None:
        if self.space not in ("raw", "unit"):
            raise BadSettings(f"space {self.space!r} is neither 'raw' nor 'unit'")
        layers = self.layers
        if not layers or min(layers) < 0 or max(layers) > self.n_layers:
            raise BadSettings(f"a probe of layers {layers} and a model of {self.n_layers} layers")

    @property
    def n_tasks(self) -> int:
        """How many ranks it tells apart."""
        return len(self.weights.intercepts)

    @property
    def d_model(self) -> int:
        """The width of the states."""
        return len(self.weights.mean)

    def __repr__(self) -> str:
        low, high = min(self.layers), max(self.layers)
        return (
            f"TaskProbe({self.n_tasks} tasks of {self.model['name']} through {self.lens}, "
            f"trained on {len(self.layers)} layers from {low} to {high})"
        )

    @classmethod
    def fit(
        cls,
        saturation: Saturation,
        states: States,
        *,
        choice: CellSampling | None = None,
        strength: float = STRENGTH,
        space: Space = "raw",
        quality: Iterable[Mapping[str, Any]] = (),
    ) -> "TaskProbe":
        """A probe of all rows given; how good it is only other rows can tell: `score_probe`.

        Args:
            saturation: of the rows to train on.
            states: of the same rows in the same order.
            choice: which (row, layer) are taken.
            strength: inverse of the penalty on coefficients, scikit-learn's C.
            space: what is done to a state first.
            quality: what `score_probe` found, to be saved with the probe.
        """
        choice = choice or CellSampling()
        require_strength(strength)
        require_aligned(saturation, states)
        cells = cells_of(saturation, choice)
        x = features(states, cells, space)
        weights = Softmax.fit(x, cells.task, cells.n_tasks, strength)
        data = {
            "cells": len(cells), "rows": len(cells.row.unique()),
            "documents": len(saturation.documents[cells.row].unique()),
        }  # fmt: skip
        return cls(
            weights, cells.layers, states.n_layers, states.model, saturation.lens, space,
            {**asdict(choice), "strength": strength}, data, tuple(quality),
        )  # fmt: skip

    def probabilities(self, h: Tensor) -> Tensor:
        """How likely each rank is the one being decided: (row, d_model) -> (row, task)."""
        if h.shape[-1] != self.d_model:
            raise BadSettings(f"states of width {h.shape[-1]} for a probe of {self.d_model}")
        return self.weights.probabilities(in_space(h, self.space))

    def later(self, h: Tensor, layer: int) -> Tensor:
        """How likely rank 2 or later is being decided: (row, d_model) -> (row,).

        0 at a layer that the probe was not trained on: what it says there means nothing, and the
        rule `Task` then does not exit.
        """
        if layer not in self.layers:
            return torch.zeros(len(h), dtype=torch.float64, device=h.device)
        return 1 - self.probabilities(h)[:, 0]

    def evidence(self, states: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Extra evidence for the rule `Task` from h[layer] by layer, as a live run has them."""
        columns = [self.later(h, layer) for layer, h in sorted(states.items())]
        return {EVIDENCE: torch.stack([column.cpu() for column in columns], 1)}

    def check_model(self, transformer: Transformer) -> None:
        """Raise `WrongModel` unless the probe was fitted on exactly these weights."""
        PROBE.check_model(self.model, self.n_layers, self.d_model, transformer)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the probe, all or nothing; only an earlier probe or an empty folder goes."""
        said = {key: getattr(self, key) for key in KEPT} | {"layers": list(self.layers)}
        tensors = {name: getattr(self.weights, name).contiguous() for name in ARRAYS}
        return PROBE.save(folder, said, tensors, _readme(self))

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        transformer: Transformer | None = None,
        *,
        revision: str | None = None,
        token: str | None = None,
    ) -> "TaskProbe":
        """Load a probe from a folder or a hub repository; a damaged one is an error.

        Args:
            source: the folder or the repository.
            transformer: the model that it is to be used on: another than it was fitted on is an
                error. Left out, `check_model` is the caller's to call.
            revision: of the repository.
            token: for the hub.
        """
        path, config, tensors = PROBE.load(source, revision=revision, token=token)
        try:
            require_identity(config["model"])
            said = {key: config[key] for key in KEPT}
            said |= {"layers": tuple(config["layers"]), "quality": tuple(config["quality"])}
            found = cls(Softmax(**{name: tensors[name] for name in ARRAYS}), **said)
        except (KeyError, TypeError, ValueError, AttributeError, BadSettings) as error:
            raise BadArtifact(f"{path} does not describe a probe ({error})") from error
        if transformer is not None:
            found.check_model(transformer)
        return found


def features(states: States, cells: Cells, space: Space) -> Tensor:
    """The states of all cells: (cell, d_model), float64; the only large thing that is held."""
    found = in_space(states.cells(cells.row, cells.layer), space)
    if not found.isfinite().all():
        raise NotFinite("NaN or infinite states cannot be learned from; look for broken rows")
    return found


def _readme(probe: TaskProbe) -> str:
    said = {"model": probe.model["name"], "lens": probe.lens, "space": probe.space}
    bullets = {**said, **probe.data, **probe.settings}
    scores = []
    for row in probe.quality:
        of = "" if row["task"] is None else f" of task {row['task']}"
        scores.append(f"- {row['measure']}{of}: {row['value']:.3f}, chance {row['chance']:g}")
    return "\n".join(
        [
            "---", "library_name: layerleap", "tags: [layerleap, interpretability]", "---", "",
            f"# Which rank is being decided: a probe of {probe.model['name']}", "",
            f"{probe!r}", "", "## Made from", "",
            *(f"- {key}: {value}" for key, value in bullets.items()), "",
            "## How good", "", *(scores or ["Not measured."]), "",
        ]
    )  # fmt: skip
