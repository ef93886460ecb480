"""A delta applied to a model: it computes with changed parameters, and keeps its own.

In: a `Delta`, and a factor. Out: an edit for `model.edit`, in force for passes and for `generate`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from layerleap.act.learning.delta import Delta, changed
from layerleap.errors import BadSettings
from layerleap.models.hooks.edit import Change, Edit
from layerleap.models.hooks.forward import Parameters
from layerleap.models.hooks.parameters import places
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class ApplyDelta(Edit):
    """Run the model as if it had learned `factor` times what the delta holds.

        with model.edit(ll.edits.ApplyDelta(delta)):
            text = ll.generate(model, "The capital of France is")

    Several deltas add up. The parameters of the model are not touched, on no thread.
    """

    delta: Delta
    factor: float = 1.0

    def changes(self, transformer: Transformer) -> list[Change]:
        """At every module that uses one of the parameters."""
        if not isinstance(self.delta, Delta):
            raise BadSettings(f"{self.delta!r:.60} is not a Delta")
        self.delta.check_model(transformer)
        found = places(transformer, list(self.delta.tensors))
        return [Change(1, module, "weights", self._changing(own)) for module, own in found.items()]

    def _changing(self, own: Mapping[str, str]) -> Callable[[Parameters], Parameters]:
        @torch.no_grad()
        def change(parameters: Parameters) -> Parameters:
            tensors = {name: self.delta.tensors[full] for name, full in own.items()}
            factor = self.factor
            return {
                name: changed(parameters[name], value if factor == 1.0 else value * factor)
                for name, value in tensors.items()
            }

        return change
