"""Steps of an optimizer, one parameter at a time, with all of its state in named tensors.

In: a parameter and its gradient. Out: the parameter, changed in place.

A step needs no gradient but the parameter's own, so that a block can learn as soon as its gradient
is there; and everything a checkpoint has to hold is a dictionary of tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerleap.act.fine_tuning import Kind

BETAS, EPSILON = (0.9, 0.95), 1e-8


@dataclass
class Optimizer:
    """AdamW or plain SGD; both shrink matrices by weight decay, if there is any."""

    kind: Kind
    decay: float = 0.0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of AdamW, by name

    @torch.no_grad()
    def update(
        self,
        name: str,
        value: Tensor,
        gradient: Tensor,
        rate: float,
        step: int,
        mask: Tensor | None = None,
    ) -> None:
        """Change a parameter by one step; steps count from 1.

        `mask` is True where the parameter learns: the rest does not decay either.
        """
        gradient = gradient.to(value.device, value.dtype)
        if self.decay and value.dim() > 1:
            kept = 1 - rate * self.decay
            value.mul_(kept if mask is None else torch.where(mask.to(value.device), kept, 1.0))
        if self.kind == "sgd":
            value.sub_(gradient, alpha=rate)
            return
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(value), torch.zeros_like(value)
        first, second = self.moments[name]
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        size = (second / (1 - BETAS[1] ** step)).sqrt_().add_(EPSILON)
        value.addcdiv_(first, size, value=-rate / (1 - BETAS[0] ** step))

    def tensors(self) -> dict[str, Tensor]:
        """The state, to save."""
        named: dict[str, Tensor] = {}
        for name, (first, second) in self.moments.items():
            named |= {f"first.{name}": first, f"second.{name}": second}
        return named

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Load what `tensors` gave; others are ignored. Tensors go where the values are."""
        self.moments = {
            name: (
                tensors[f"first.{name}"].to(value.device),
                tensors[f"second.{name}"].to(value.device),
            )
            for name, value in values.items()
            if f"first.{name}" in tensors
        }
