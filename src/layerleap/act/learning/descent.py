"""Gradient descent on demonstrations, as a function from a model to a delta.

In: a wrapped model and demonstrations. Out: `Learned`: the delta, and the losses on the way.

One pass over the demonstrations in the order given, one at a time, each a plain step

    delta <- delta - learning_rate * gradient        no momentum, no clipping

as in "In-context Learning and Gradient Descent Revisited" (arXiv 2311.07772).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.act.fine_tuning import How
from layerleap.act.learning.delta import Delta, changed, wide_dtype
from layerleap.act.learning.gradients import gradients
from layerleap.act.learning.lessons import Demonstration, Tokens, lesson, require_readable
from layerleap.act.learning.parameters import choose
from layerleap.arguments import checked
from layerleap.errors import BadSettings, NotFinite
from layerleap.lens.lens import Lens
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.short_repr import ShortRepr


@dataclass(frozen=True, eq=False, repr=False)
class Learned(ShortRepr):
    """What was learned, and the losses before each step."""

    delta: Delta
    losses: list[dict[int, float]]  # by step: the mean loss in nats by layer

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"settings": dict(self.delta.settings), "losses": self.losses}


@checked
def learn(
    transformer: Transformer,
    demonstrations: Sequence[Demonstration],
    learning_rate: float,
    *,
    how: How = "full",
    parameters: str | Sequence[str] = "keys-values",
    tokens: Tokens = "all",
    lens: Lens | None = None,
    start: Delta | None = None,
    share: float = 1.0,
    seed: int = 0,
    progress: Progress = silent,
) -> Learned:
    """Learn demonstrations by one pass of gradient descent, one demonstration a step.

    Args:
        demonstrations: in the order in which they are learned.
        learning_rate: of plain steps.
        how: "full", plain back-propagation; or "layer-causal", every block by its own loss.
        parameters: those that learn; see `act.learning.parameters`.
        tokens: "all" tokens of a demonstration count, as in the paper, or only those of the
            "answer".
        lens: what every layer's loss is read through, for "layer-causal"; the logit lens when None.
        start: a delta to continue from.
        share: of the rows that the losses below the last layer are computed on; 1 is the paper's.
        seed: of the share.
    """
    if not 0 < learning_rate < math.inf:
        raise BadSettings(f"learning_rate is {learning_rate}; expected a number above 0")
    require_readable(transformer, [len(one.ids) for one in demonstrations], "demonstration")
    lessons = [lesson(transformer, [one], tokens) for one in demonstrations]
    chosen = choose(transformer, parameters)
    known = dict(transformer.model.named_parameters())
    n_before = 0  # demonstrations that were learned already
    delta = {
        name: torch.zeros_like(known[name], dtype=wide_dtype(known[name])) for name in chosen.names
    }
    if start is not None:
        start.check_model(transformer)
        for name, value in start.tensors.items():
            delta[name] = value.to(known[name].device, copy=True)
        n_before = int(start.settings.get("demonstrations", 0))
    if learning_rate > (most := min(torch.finfo(one.dtype).max for one in delta.values())):
        raise BadSettings(f"learning_rate is {learning_rate}; expected at most {most:.3g}")
    losses: list[dict[int, float]] = []
    options: Any = {"how": how, "lens": lens, "share": share}
    for step, one in enumerate(lessons):
        with torch.no_grad():
            values = {name: changed(known[name], value) for name, value in delta.items()}
        step_seed = seed + n_before + step
        result = gradients(transformer, chosen, values, one, seed=step_seed, **options)
        for name, gradient in result.tensors.items():
            delta[name].sub_(gradient.to(delta[name].dtype), alpha=learning_rate)
        losses.append(result.losses)
        progress("learning", step + 1, len(lessons), "demonstrations")
    require_finite(delta)
    settings = {
        "how": how,
        "learning_rate": learning_rate,
        "parameters": list(chosen.words),
        "tokens": tokens,
        "lens": (lens or Lens(transformer)).name if how != "full" else None,
        "share": share,
        "seed": seed,
        "demonstrations": n_before + len(lessons),
    }
    return Learned(Delta.of(transformer, delta, **settings), losses)


def require_finite(values: Mapping[str, Tensor]) -> None:
    """Refuse what the last step made infinite; earlier steps show in the next one's loss."""
    if bad := [name for name, value in values.items() if not value.isfinite().all()]:
        raise NotFinite(
            f"what was learned is NaN or infinite in {bad[0]} after the last step; lower the "
            "learning rate, or use a wider dtype"
        )
