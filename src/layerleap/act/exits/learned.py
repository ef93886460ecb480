"""A learned rule: one small classifier per layer predicts whether the reading is already final.

In: `Evidence` of a finished pass, to train on. Out: a family of `Learned` rules by threshold, which
exit where the predicted probability of agreement is above it.

The classifiers are logistic regressions on standardised features, fitted by scikit-learn and stored
as plain arrays, so applying or loading one needs neither scikit-learn nor a pickle. The predicted
probability is not a guarantee: train on some rows and calibrate the threshold on others (`split`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from layerleap.act.exits.evidence import FIRST_EXIT, Evidence
from layerleap.act.exits.replay import require_finished
from layerleap.act.exits.rules import Family, Rule, ThresholdRule, family
from layerleap.errors import BadSettings, BadText
from layerleap.extras import learn_library

FEATURES = (
    "logit of p1",
    "log of gap",
    "entropy",
    "cosine",
    "streak",
    "repeats",
    "logit of p1 before",
    "log of position",
)
CLOSEST = 1e-6  # probabilities and gaps are clipped this far from 0 and 1 before taking logs
ARRAYS = ("mean", "scale", "coefficients", "intercepts")


def features(evidence: Evidence) -> Tensor:
    """(row, layer, feature), float64: `FEATURES`, then the extra evidence in order of name.

    Causal: a column depends on itself and the previous one. Layer 0 is never checked, so it does
    not count as a previous column; without one, the features that need it are 0. So is an unknown
    cosine.
    """
    logit = evidence.top_prob.double().clamp(CLOSEST, 1 - CLOSEST).logit()
    before = torch.zeros_like(logit)
    before[:, 1:] = torch.where(evidence.may_exit[:-1], logit[:, :-1], 0.0)
    columns = [
        logit,
        evidence.gap.clamp_min(CLOSEST).log(),
        evidence.entropy.double(),
        evidence.cosine.double().nan_to_num(0.0),
        evidence.streak.double(),
        evidence.repeats.double(),
        before,
        evidence.position.double().log1p()[:, None].expand_as(logit),
        *(evidence.extra[name].double() for name in sorted(evidence.extra)),
    ]
    return torch.stack(columns, 2)


@dataclass(frozen=True, eq=False)
class Models:
    """Logistic regressions, one per layer; arrays are (layer, feature), intercepts (layer,)."""

    layers: tuple[int, ...]  # from layer 1 on
    extra: tuple[str, ...]  # names of the extra evidence, sorted
    mean: Tensor
    scale: Tensor
    coefficients: Tensor
    intercepts: Tensor

    def __post_init__(self) -> None:
        by_layer = (len(self.layers), len(FEATURES) + len(self.extra))
        for name, array in ((name, getattr(self, name)) for name in ARRAYS):
            expected = by_layer[:1] if name == "intercepts" else by_layer
            if tuple(array.shape) != expected:
                raise BadSettings(
                    f"{name} of a learned rule of {by_layer[0]} layers has shape "
                    f"{tuple(array.shape)}; expected {expected}"
                )
            if not array.isfinite().all():
                raise BadSettings("a learned rule contains NaN or infinite numbers; train it again")

    def probability(self, evidence: Evidence) -> Tensor:
        """(row, layer): probability that the top token is final; NaN at layer 0."""
        if missing := [name for name in self.extra if name not in evidence.extra]:
            raise BadSettings(
                f"this learned rule needs the extra evidence {missing[0]!r}; add it to the evidence"
            )
        checked = [layer for layer in evidence.layers if layer >= FIRST_EXIT]
        if tuple(checked) != self.layers[: len(checked)]:
            raise BadSettings(
                f"this learned rule was trained on layers {self.layers}, but the evidence has "
                f"layers {tuple(checked)}, where its features differ; check the same layers"
            )
        used = {name: evidence.extra[name] for name in self.extra}
        n, skipped = len(checked), len(evidence.layers) - len(checked)
        x = features(replace(evidence, extra=used))[:, skipped:]
        z = ((x - self.mean[:n]) / self.scale[:n] * self.coefficients[:n]).sum(-1)
        p = (z + self.intercepts[:n]).sigmoid()
        return torch.nn.functional.pad(p, (skipped, 0), value=torch.nan)


@dataclass(frozen=True, eq=False)
class Learned(ThresholdRule):
    """Exit where the predicted probability of agreement is above `threshold`.

    Created by `Learned.train`, so it is always trained.
    """

    threshold: float
    models: Models
    name = "learned"
    needs = "reading"
    least, most = 0, 1
    expected = "a probability from 0 to 1"
    sentence = "exit if the predicted probability of agreement > {threshold:g}"

    def _score(self, evidence: Evidence) -> Tensor:
        return self.models.probability(evidence)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; floats survive the round trip through JSON unchanged."""
        arrays = {name: getattr(self.models, name).tolist() for name in ARRAYS}
        columns = {"layers": list(self.models.layers), "extra": list(self.models.extra)}
        return {"name": self.name, "threshold": self.threshold, **columns, **arrays}

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Rule:
        """The rule with these fields: `to_dict` without the name."""
        arrays = {name: torch.tensor(values[name], dtype=torch.float64) for name in ARRAYS}
        models = Models(tuple(values["layers"]), tuple(values["extra"]), **arrays)
        return cls(values["threshold"], models)

    @classmethod
    def train(cls, evidence: Evidence, *, strength: float = 1.0) -> Family:
        """Train one classifier per layer and return the family of rules by threshold.

        Args:
            evidence: rows of a finished pass. Calibration needs other rows.
            strength: inverse strength of the penalty, scikit-learn's C.
        """
        if not 0 < strength < float("inf"):
            raise BadSettings(f"strength {strength} is out of range; expected a number above 0")
        require_finished(evidence)
        x, agrees = features(evidence), evidence.agrees
        if not x[:, evidence.may_exit].isfinite().all():
            raise BadText(
                "the evidence contains NaN or infinite values, so no rule can be trained on it; "
                "read every layer"
            )
        columns = {layer: n for n, layer in enumerate(evidence.layers) if layer >= FIRST_EXIT}
        layers = tuple(columns)
        fits = [_fit(x[:, n], agrees[:, n], strength) for n in columns.values()]
        arrays = dict(zip(ARRAYS, map(torch.stack, zip(*fits, strict=True)), strict=True))
        models = Models(layers, tuple(sorted(evidence.extra)), **arrays)
        return family(cls, models=models)


def _fit(x: Tensor, agrees: Tensor, strength: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, scale, coefficients and intercept of one layer's classifier."""
    if agrees.all() or not agrees.any():  # one class: a constant, by the rule of succession
        rate = (agrees.double().sum() + 1) / (len(agrees) + 2)
        zeros = torch.zeros(x.shape[1], dtype=torch.float64)
        return zeros, zeros + 1, zeros, rate.logit()
    linear, scaling = learn_library("sklearn.linear_model"), learn_library("sklearn.preprocessing")
    scaler = scaling.StandardScaler().fit(x.numpy())
    model = linear.LogisticRegression(C=strength, max_iter=1000)
    model.fit(scaler.transform(x.numpy()), agrees.numpy())
    return (
        torch.from_numpy(scaler.mean_),
        torch.from_numpy(scaler.scale_),
        torch.from_numpy(model.coef_[0]),
        torch.tensor(model.intercept_[0], dtype=torch.float64),
    )
