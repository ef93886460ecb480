"""Where the blocks and the tail of a model are, found by structure and execution order.

In: the trace of one forward pass.
Out: the path of the block behind each layer, and the steps from h[n_layers] to the logits.
Not here: whether that is true. `laws` checks it with fresh inputs.

No family is named anywhere: the blocks are the last outermost chain of modules in which
each takes what the one before gave; the tail is what runs afterwards, with the plain
operations between modules (a scale, a soft-cap, picking a position) inferred from numbers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
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


def find_blocks(
    model: nn.Module, calls: Sequence[Call], wanted: str | None = None
) -> tuple[Call, ...]:
    """The call behind each layer: entry 0 turns h[0] into h[1]. `wanted` names the list."""
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and (wanted is None or path == wanted)
    }
    if not lists:
        raise ModelRefused(
            f"no list of blocks{f' at {wanted!r}' if wanted else ''} in {type(model).__name__}: "
            "wanted an nn.ModuleList whose items run one after the other; " + BY_HAND
        )
    chains = [chain for module in lists.values() if (chain := _chain(module, calls))]
    outermost = [
        chain
        for chain in chains
        if not any(other is not chain and _holds(other, chain) for other in chains)
    ]
    if not outermost:
        raise ModelRefused(
            f"law 'chain' failed for {type(model).__name__}: in none of {sorted(lists)} does each "
            "item take exactly the state that the item before gave; " + BY_HAND
        )
    # An encoder-decoder has two chains; the one that ends last is the one that feeds the head.
    return max(outermost, key=lambda chain: chain[-1].end)


BY_HAND = (
    "if you know better, name the paths by hand: "
    "load(model, blocks='path.of.the.list', tail=['path.of.final.norm', 'path.of.head'])"
)


def _chain(items: nn.Module, calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls of a list's items, if each takes what the one before gave; else nothing."""
    members = {id(item) for item in items.children()}
    ran = tuple(call for call in calls if id(call.module) in members)
    if not ran or members != {id(call.module) for call in ran}:
        return ()
    for call in ran:
        if call.takes is None or call.gives is None or call.takes.dim() != 3:
            return ()
        if call.gives.shape != call.takes.shape:
            return ()
    for before, after in itertools.pairwise(ran):
        if before.end > after.start or not is_same(after.takes, before.gives):
            return ()
    return ran


def _holds(outer: tuple[Call, ...], inner: tuple[Call, ...]) -> bool:
    return any(call.contains(inner[0]) for call in outer)


def find_tail(
    model: nn.Module,
    calls: Sequence[Call],
    last_block: Call,
    logits: Tensor,
    wanted: Sequence[str] | None = None,
) -> tuple[Step, ...]:
    """The steps that turn what leaves the last block into `logits`."""
    config = getattr(model, "config", None)
    value, steps = last_block.gives, []
    assert value is not None
    for call in _after(calls, last_block, wanted):
        if call.takes is None or call.gives is None:
            continue
        glue = _explain(value, call.takes)
        if glue is None:
            glue = _ignored(value, call)
        if glue is None:
            if wanted is not None:
                raise ModelRefused(
                    f"law 'tail' failed: {call.path!r} does not take what the step before gives; "
                    + BY_HAND
                )
            continue  # a side branch, such as a router's loss
        if is_same(call.gives, call.takes):
            continue  # dropout and other identities
        steps += [*glue, Step("module", call.path)]
        value = call.gives
    glue = _capped(value, logits, config) or _explain(value, logits)
    if glue is None:
        found = " -> ".join(str(step) for step in steps) or "nothing"
        raise ModelRefused(
            f"law 'tail' failed for {type(model).__name__}: {found} ran after the last block and "
            f"does not give the model's logits (off by {row_gap(value, logits):.2g}); {BY_HAND}"
        )
    return (*steps, *glue)


def _after(calls: Sequence[Call], last_block: Call, wanted: Sequence[str] | None) -> list[Call]:
    """Calls that start after the last block and lie in no other such call."""
    later = [call for call in calls if call.start > last_block.end]
    if wanted is not None:
        missing = [path for path in wanted if all(call.path != path for call in later)]
        if missing:
            raise ModelRefused(
                f"law 'tail' failed: {missing[0]!r} does not run after the last block; {BY_HAND}"
            )
        return [next(call for call in later if call.path == path) for path in wanted]
    return [call for call in later if not any(other.contains(call) for other in later)]


def _explain(value: Tensor, target: Tensor) -> list[Step] | None:
    """The plain operations between two recorded tensors; None if there is no simple story."""
    if value.shape == target.shape and is_same(value, target):
        return []
    if value.dim() == 3 and target.dim() == 2:
        for position in range(value.shape[1]):
            rest = _explain(value[:, position], target)
            if rest is not None:
                return [Step("pick", number=position), *rest]
        return None
    if value.shape != target.shape:
        return None
    return _scaled(value, target) or _activated(value, target)


@torch.no_grad()
def _ignored(value: Tensor, call: Call) -> list[Step] | None:
    """Picking a position and filling up with zeros, if the module gives the same to the bit.

    Some heads take a mean over all positions beside the picked state. A state then has a
    reading of its own only if the head's weights for the mean are zero.
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


def _scaled(value: Tensor, target: Tensor) -> list[Step] | None:
    exact = value.double()
    number = ((exact * target.double()).sum() / exact.square().sum()).item()
    return [Step("scale", number=number)] if is_rounded(value * number, target) else None


def _capped(value: Tensor, logits: Tensor, config: Any) -> list[Step] | None:
    """A soft-cap that the configuration speaks of.

    Tried before anything else: below the cap it hardly differs from doing nothing.
    """
    cap = getattr(config, "final_logit_softcapping", None)
    if cap and is_rounded(cap * torch.tanh(value / cap), logits):
        return [Step("cap", number=float(cap))]
    return None


def _activated(value: Tensor, target: Tensor) -> list[Step] | None:
    if is_rounded(nn.functional.gelu(value), target):
        return [Step("activate")]
    return None
