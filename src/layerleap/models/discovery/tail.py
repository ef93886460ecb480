"""The tail of a model: the steps from the last block's output to the logits.

In: the trace of one forward pass and the call of the last block.
Out: the modules that run after the last block, with the plain operations between them (a scale, a
soft-cap, picking a position) inferred from the recorded tensors.
Not here: verification. `laws` checks the result on fresh inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.discovery.blocks import PATHS_HINT
from layerleap.models.discovery.compare import is_rounded, is_same, row_gap
from layerleap.models.discovery.trace import Call, state_given


@dataclass(frozen=True)
class Step:
    """One operation of the tail: a module by path, or a plain operation with a number."""

    kind: Literal["module", "scale", "cap", "pick", "pad", "activate"]
    path: str = ""
    number: float = 0.0

    def __str__(self) -> str:
        return self.path or f"{self.kind}({self.number:.6g})"


def find_tail(
    model: nn.Module,
    calls: Sequence[Call],
    last_block: Call,
    logits: Tensor,
    paths: Sequence[str] | None = None,
) -> tuple[Step, ...]:
    """The steps that turn the last block's output into `logits`, the model's own output.

    `paths` are those of the modules after the last block; None to discover them.
    """
    config = getattr(model, "config", None)
    value, steps = last_block.gives, []
    assert value is not None
    for call in _later_calls(calls, last_block, paths):
        if call.takes is None or call.gives is None:
            continue
        between = _operations(value, call.takes)
        if between is None:
            between = _ignored_input(value, call)
        if between is None:
            if paths is not None:
                raise ModelRefused(
                    f"law 'tail' failed: the input of {call.path!r} is not the output of the step "
                    f"before it; {PATHS_HINT}"
                )
            continue  # a side branch, such as a router's loss
        if is_same(call.gives, call.takes):
            continue  # dropout and other identities
        steps += [*between, Step("module", call.path)]
        value = call.gives
    between = _soft_cap(value, logits, config) or _operations(value, logits)
    if between is None:
        path = " -> ".join(str(step) for step in steps) or "nothing"
        raise ModelRefused(
            f"law 'tail' failed for {type(model).__name__}: {path} ran after the last block, but "
            f"its output is not the model's logits (off by {row_gap(value, logits):.2g}); "
            f"{PATHS_HINT}"
        )
    return (*steps, *between)


def _later_calls(
    calls: Sequence[Call], last_block: Call, paths: Sequence[str] | None
) -> list[Call]:
    """The outermost calls after the last block, or those at the given paths."""
    later = [call for call in calls if call.start > last_block.end]
    if paths is not None:
        missing = [path for path in paths if all(call.path != path for call in later)]
        if missing:
            raise ModelRefused(
                f"law 'tail' failed: {missing[0]!r} does not run after the last block; {PATHS_HINT}"
            )
        return [next(call for call in later if call.path == path) for path in paths]
    return [call for call in later if not any(other.contains(call) for other in later)]


def _operations(value: Tensor, target: Tensor) -> list[Step] | None:
    """The plain operations that turn `value` into `target`; None if no simple ones do."""
    if value.shape == target.shape and is_same(value, target):
        return []
    if value.dim() == 3 and target.dim() == 2:
        for position in range(value.shape[1]):
            rest = _operations(value[:, position], target)
            if rest is not None:
                return [Step("pick", number=position), *rest]
        return None
    if value.shape != target.shape:
        return None
    return _scale(value, target) or _activation(value, target)


@torch.no_grad()
def _ignored_input(value: Tensor, call: Call) -> list[Step] | None:
    """Picking a position and padding with zeros, if the module's output stays bit-identical.

    Some heads also take the mean over all positions. A single state can then be read only if the
    head's weights for the mean are zero.
    """
    takes = call.takes
    if takes is None or value.dim() != 3 or takes.dim() != 2:
        return None
    width = value.shape[-1]
    if takes.shape[-1] <= width:
        return None
    alone = takes.clone()
    alone[:, width:] = 0
    if not is_same(state_given(call.module(alone)), call.gives):
        return None
    for position in range(value.shape[1]):
        if is_same(value[:, position], takes[:, :width]):
            return [Step("pick", number=position), Step("pad", number=takes.shape[-1])]
    return None


def _scale(value: Tensor, target: Tensor) -> list[Step] | None:
    exact = value.double()
    number = ((exact * target.double()).sum() / exact.square().sum()).item()
    return [Step("scale", number=number)] if is_rounded(value * number, target) else None


def _soft_cap(value: Tensor, logits: Tensor, config: Any) -> list[Step] | None:
    """The soft-cap in the model's configuration, if it explains the logits.

    Tried first: well below the cap it can hardly be told from no operation.
    """
    cap = getattr(config, "final_logit_softcapping", None)
    if cap and is_rounded(cap * torch.tanh(value / cap), logits):
        return [Step("cap", number=float(cap))]
    return None


def _activation(value: Tensor, target: Tensor) -> list[Step] | None:
    if is_rounded(nn.functional.gelu(value), target):
        return [Step("activate")]
    return None
