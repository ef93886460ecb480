"""What a lens reads off one state, as a linear function of that state.

In: a lens and one state of h[layer]. Out: `Readout`: the logits, and for a combination of logits
its gradient in the state and the constants, in float32 or wider:

    score = gradient @ state + sum of constants

The map, the head and scales are linear. A norm is, once the size of the whole state is fixed:

    norm(h) = gain * (h - mean(h) if it centres) * size + shift

With the size of the whole state, the shares of its parts add up; with their own sizes they would
not. A soft-cap is not linear, so scores are those before it.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.lens.lens import Lens
from layerleap.models.discovery.compare import rounding
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


@dataclass(frozen=True)
class _Link:
    """One step from the state to the logits."""

    name: str  # of what it adds whatever its input
    back: Callable[[Tensor], Tensor]
    constant: Callable[[Tensor], float] = lambda _: 0.0


class Readout:
    """The way from one state of h[layer] to logits, linear at that state."""

    @torch.no_grad()
    def __init__(self, lens: Lens, layer: int, state: Tensor) -> None:
        """`state` is (1, d_model), as `capture` gives it with one kept position."""
        transformer = self.transformer = lens.transformer
        self.is_capped = False
        self._links: list[_Link] = []
        value = state
        if lens.map(layer).kind != "logit":
            value = self._affine("map bias", lens.map(layer), value)
        value = value[:, None]  # one-token texts, which every tail accepts
        for step in transformer.tail:
            if self.is_capped or step.kind in (*ACTIVATIONS, "join"):
                raise self._not_linear(f"applies {step} to its states")
            value = self._step(step, value)
        self.logits = wide(value).reshape(-1)

    def scored(self, target: Tensor) -> tuple[float, Tensor, dict[str, float]]:
        """A combination of logits: its score, its gradient in the state, and its constants."""
        score = float(self.logits.double() @ target.double())
        constants: dict[str, float] = {}
        gradient = target.to(self.logits)
        for link in reversed(self._links):
            if constant := link.constant(gradient):
                constants[link.name] = constants.get(link.name, 0.0) + constant
            gradient = link.back(gradient)
        return score, gradient, constants

    def _step(self, step: Step, value: Tensor) -> Tensor:
        if step.kind == "cap":
            self.is_capped = True
            return value
        if step.kind == "module":
            module = self.transformer.model.get_submodule(step.path)
            if is_norm(module) or {p.dim() for p in module.parameters()} == {1}:
                norm = FrozenNorm.at(module, value)
                self._links.append(_Link("final norm bias", norm.back, norm.constant))
                return self.transformer.apply(step, value)
            return self._affine("head bias", partial(self.transformer.apply, step), value, module)
        if step.kind == "scale":
            self._links.append(_Link("", lambda gradient: gradient * step.number))
        elif step.kind == "pad":
            width = value.shape[-1]
            self._links.append(_Link("", lambda gradient: gradient[:width]))
        return self.transformer.apply(step, value)  # picking a position changes no number

    def _affine(
        self,
        name: str,
        function: Callable[[Tensor], Tensor],
        value: Tensor,
        module: nn.Module | None = None,
    ) -> Tensor:
        """The value after a map or a module."""
        with torch.inference_mode(False), torch.enable_grad():
            x = value.detach().clone().requires_grad_()
            given = function(x)

        def back(gradient: Tensor) -> Tensor:
            outside = gradient.reshape(given.shape).to(given.dtype)
            (inside,) = torch.autograd.grad(given, x, outside, retain_graph=True)
            terms = wide(inside).double() * wide(x).double()
            total = float(gradient.double() @ wide(given).flatten().double())
            excess = abs(float(terms.sum()) + constant(gradient) - total)
            if excess > 10 * rounding(value) * (abs(total) + float(terms.abs().sum())):
                raise self._not_linear("has a part that is not linear")
            return wide(inside).flatten()

        if module is not None and has_matrix(module):
            shift = getattr(module, "bias", None)  # without another product with the matrix
        else:
            shift = function(torch.zeros_like(value))
        shift = None if shift is None else wide(shift).flatten().double()

        def constant(gradient: Tensor) -> float:
            return 0.0 if shift is None else float(gradient.double() @ shift)

        self._links.append(_Link(name, back, constant))
        return given.detach()

    def _not_linear(self, reason: str) -> ModelRefused:
        return ModelRefused(
            f"the head of {self.transformer.identity.name} {reason}, so a logit is not a sum over "
            "what the parts of the model add; attribute a model whose head is a norm and a matrix"
        )
