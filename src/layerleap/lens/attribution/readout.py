"""What a lens reads off one state, as a linear function of that state.

In: a lens and one state of h[layer]. Out: `Readout`: the logits, and for a combination of logits
its gradient in the state and the constants, in float32 or wider:

    score = gradient @ state + sum of constants

The map, the head and scales are linear. A norm is, once the size of the whole state is fixed:

    norm(h) = gain * (h - mean(h) if it centres) * size + shift

With the size of the whole state, the shares of its parts add up; with their own sizes they would
not. A soft-cap is not linear, so scores are those before it.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.lens.lens import Lens
from layerleap.models.discovery.compare import ROUNDING, rounding
from layerleap.models.discovery.sites import is_norm
from layerleap.models.discovery.tail import ACTIVATIONS, Step
from layerleap.models.weights.matrices import has_matrix
from layerleap.models.weights.norms import Fold, fold_of, norm_gain


def wide(value: Tensor) -> Tensor:
    """The tensor in float32 or wider, without gradients."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm, or a learned scale, with the statistics of one state."""

    fold: Fold
    size: Tensor  # the common factor; fitted, as each family has its own epsilon
    shift: Tensor  # (d_model,)

    @classmethod
    @torch.no_grad()
    def at(cls, norm: nn.Module, state: Tensor) -> "FrozenNorm":
        """The norm at one state, of any shape with d_model numbers."""
        row = wide(state).reshape(1, -1)
        exact = norm if state.dtype == row.dtype else deepcopy(norm).to(row.dtype)
        fold = fold_of(exact, row)
        shift = norm_gain(exact, row, fold.centres)[1]
        plain, given = fold.into_writer(row)[0], wide(exact(row))[0] - shift
        return cls(fold, (plain @ given) / plain.square().sum().clamp_min(1e-30), shift)

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient in the norm's input, of one in its output: (d_model,)."""
        return self.fold.into_reader(gradient[None])[0] * self.size

    def constant(self, gradient: Tensor) -> float:
        """What the norm adds to a score whatever its input."""
        return float(gradient.double() @ self.shift.double())


class Readout:
    """The way from one state of h[layer] to logits, linear at that state."""

    def __init__(self, lens: Lens, layer: int, state: Tensor) -> None:
        """`state` is (1, d_model), as `capture` gives it with one kept position."""
        self.transformer, self.is_capped = lens.transformer, False
        self._constants: list[tuple[str, Tensor]] = []
        with torch.inference_mode(False), torch.enable_grad():
            self._state = value = state.detach().clone().requires_grad_()
            if (shortcut := lens.map(layer)).kind != "logit":
                value = self._plus("map bias", shortcut(value), shortcut(torch.zeros_like(value)))
            value = value[:, None]  # one-token texts, which every tail accepts
            for step in self.transformer.tail:
                value = self._step(step, value)
        self._logits, self.logits = value, wide(value).flatten()

    def scored(self, target: Tensor) -> tuple[float, Tensor, dict[str, float]]:
        """A combination of logits: its score, its gradient in the state, and its constants."""
        outside = target.reshape(self._logits.shape).to(self._logits)
        leaves = [self._state, *(leaf for _, leaf in self._constants)]
        gradient, *inside = torch.autograd.grad(self._logits, leaves, outside)
        constants: dict[str, float] = {}
        for (name, leaf), slope in zip(self._constants, inside, strict=True):
            constants[name] = constants.get(name, 0.0) + float((slope * leaf.detach()).sum())
        known = {name: value for name, value in constants.items() if value}
        score = float(self.logits.double() @ target.double())
        terms = (wide(gradient) * wide(self._state)).double()
        size, total = abs(score) + float(terms.norm()), float(terms.sum()) + sum(known.values())
        # Many norms compute in float32, whatever the model's dtype.
        if abs(total - score) > 10 * max(rounding(gradient), ROUNDING[torch.float32]) * size:
            raise self._not_linear("has a part that is not linear")
        return score, wide(gradient).flatten(), known

    def _step(self, step: Step, value: Tensor) -> Tensor:
        if self.is_capped or step.kind in (*ACTIVATIONS, "join"):
            raise self._not_linear(f"applies {step} to its states")
        if step.kind == "cap":
            self.is_capped = True
            return value
        given = self.transformer.apply(step, value)
        if step.kind != "module":
            return given
        module = self.transformer.model.get_submodule(step.path)
        if is_norm(module) or {p.dim() for p in module.parameters()} == {1}:
            norm = FrozenNorm.at(module, value)
            linear = norm.fold.into_writer(value) * norm.size
            given = given.detach() + (linear - linear.detach()).to(given)
            return self._plus("final norm bias", given, norm.shift)
        if has_matrix(module):  # without another product with the matrix
            bias = getattr(module, "bias", None)
            return given if bias is None else self._plus("head bias", given, bias)
        zero = self.transformer.apply(step, torch.zeros_like(value))
        return self._plus("head bias", given, zero)

    def _not_linear(self, reason: str) -> ModelRefused:
        return ModelRefused(
            f"the head of {self.transformer.identity.name} {reason}, so a logit is not a sum over "
            "what the parts of the model add; ll.attention and ll.read can read this model"
        )

    def _plus(self, name: str, value: Tensor, constant: Tensor) -> Tensor:
        """The value, which has the constant in it: its gradient is asked for, too."""
        leaf = constant.detach().clone().requires_grad_()
        self._constants.append((name, leaf))
        return value + (leaf - leaf.detach()).to(value)
