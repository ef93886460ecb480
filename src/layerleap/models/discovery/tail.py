"""The tail of a model: the steps from the last block's output to the logits.

In: the trace of one forward pass and the call of the last block.
Out: the modules that run after the last block, with the plain operations between them (a scale, a
soft-cap, an activation, pooling positions) inferred from the recorded tensors.
Not here: verification. `laws` checks the result on fresh inputs of other lengths.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.discovery.blocks import PATHS_HINT
from layerleap.models.discovery.compare import is_rounded, is_same, rounding, row_gap
from layerleap.models.discovery.trace import Call, state_given

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "silu": nn.functional.silu,
}
POOLS = ("pick", "mean", "join")
LAST = -1  # the last real position, whatever the length


@dataclass(frozen=True)
class Step:
    """One operation of the tail: a module by path, or a plain operation with a number.

    pick(p)  keeps the state of real position p; -1 is the last one
    mean(s)  averages the states of the positions from s on
    join(s)  puts the state of position 0 beside the mean of the positions from s on
    """

    kind: Literal[
        "module", "scale", "cap", "pad", "pick", "mean", "join", "gelu", "tanh", "relu", "silu"
    ]
    path: str = ""
    number: float = 0.0

    def __str__(self) -> str:
        if self.kind in ACTIVATIONS:
            return self.kind
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
    caps = _caps(model)
    later = _later_calls(calls, last_block, paths)
    errors = []
    # What runs first may be a side branch, such as a pooled state that no one asked for.
    for start in range(max(1, len(later)) if paths is None else 1):
        try:
            return _follow(type(model).__name__, later[start:], last_block, logits, caps, paths)
        except ModelRefused as error:
            errors.append(error)
    raise errors[0]


def _follow(
    name: str,
    later: Sequence[Call],
    last_block: Call,
    logits: Tensor,
    caps: Sequence[float],
    paths: Sequence[str] | None,
) -> tuple[Step, ...]:
    """The steps through these calls, each of which takes what the one before gave."""
    value, steps = last_block.gives, []
    assert value is not None
    for call in later:
        if call.takes is None or call.gives is None:
            continue
        between = _ignored_input(value, call)
        if between is None:
            between = _operations(value, call.takes)
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
    between = _soft_cap(value, logits, caps) or _operations(value, logits)
    if between is None:
        path = " -> ".join(str(step) for step in steps) or "nothing"
        raise ModelRefused(
            f"law 'tail' failed for {name}: {path} ran after the last block, but "
            f"its output is not the model's logits (off by {row_gap(value, logits):.2g}); "
            f"{PATHS_HINT}"
        )
    return (*steps, *between)


def _later_calls(
    calls: Sequence[Call], last_block: Call, paths: Sequence[str] | None
) -> list[Call]:
    """The outermost calls after the last block, or those at the given paths.

    A module that pools positions is opened: which positions it reads shows only inside.
    """
    later = [call for call in calls if call.start > last_block.end]
    if paths is not None:
        missing = [path for path in paths if all(call.path != path for call in later)]
        if missing:
            raise ModelRefused(
                f"law 'tail' failed: {missing[0]!r} does not run after the last block; {PATHS_HINT}"
            )
        return [next(call for call in later if call.path == path) for path in paths]
    whole = []
    for call in later:
        dims = [value.dim() for value in (call.takes, call.gives) if value is not None]
        if dims != [3, 2]:
            whole.append(call)
    return [call for call in whole if not any(other.contains(call) for other in whole)]


def _operations(value: Tensor, target: Tensor) -> list[Step] | None:
    """The plain operations that turn `value` into `target`; None if no simple ones do."""
    if value.shape == target.shape and is_same(value, target):
        return []
    if value.dim() == 3 and target.dim() == 2:
        for step, pooled in _pooled(value):
            rest = _operations(pooled, target)
            if rest is not None:
                return [step, *rest]
            if pooled.shape == target.shape and row_gap(pooled, target) < rounding(target) / 10:
                return [step]  # a mean may be summed in another order
        return None
    if value.shape != target.shape:
        return None
    return _scale(value, target) or _activation(value, target)


def _pooled(value: Tensor) -> Iterator[tuple[Step, Tensor]]:
    """Ways to pool (batch, pos, width), and what each gives; the last position comes first."""
    n = value.shape[1]
    yield Step("pick", number=LAST), value[:, -1]
    for position in range(n - 1):
        yield Step("pick", number=position), value[:, position]
    for start in range(n - 1):
        step = Step("mean", number=start)
        yield step, pool(step, value)
    for start in range(1, n - 1):
        step = Step("join", number=start)
        yield step, pool(step, value)


def pool(step: Step, value: Tensor) -> Tensor:
    """One state for all positions of a text: (row, pos, width) -> (row, width or twice that)."""
    at = int(step.number)
    if step.kind == "pick":
        return value[:, at]
    mean = value[:, at:].mean(1)
    return mean if step.kind == "mean" else torch.cat([value[:, 0], mean], -1)


@torch.no_grad()
def _ignored_input(value: Tensor, call: Call) -> list[Step] | None:
    """Picking a position and padding with zeros, if the module's output stays bit-identical.

    Some heads also take the mean over all positions. If the head's weights for the mean are zero,
    a single state can be read.
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


def _caps(model: nn.Module) -> list[float]:
    """The soft-caps of logits in the model's configuration, by whatever name."""

    def inside(settings: dict[Any, Any]) -> Iterator[float]:
        for key, value in settings.items():
            name = str(key)
            if isinstance(value, dict):
                yield from inside(value)
            elif "cap" in name and "logit" in name and "attn" not in name and value:
                yield float(value)

    config = getattr(model, "config", None)
    return [] if config is None else list(inside(config.to_dict()))


def _soft_cap(value: Tensor, logits: Tensor, caps: Sequence[float]) -> list[Step] | None:
    """The soft-cap that explains the logits, if one does.

    Tried first: well below the cap it can hardly be told from no operation.
    """
    for cap in caps:
        if is_rounded(cap * torch.tanh(value / cap), logits):
            return [Step("cap", number=cap)]
    return None


def _activation(value: Tensor, target: Tensor) -> list[Step] | None:
    for name, function in ACTIVATIONS.items():
        if is_rounded(function(value), target):
            return [Step(name)]  # type: ignore[arg-type]
    return None
