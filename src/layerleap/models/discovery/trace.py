"""One forward pass, written down: which module ran when, what it took and what it gave.

In: a model and a small probe input.
Out: a list of calls in order of execution, from which `discover` and `sites` read the
architecture instead of knowing it.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused

Shape = Callable[[Tensor], Any]  # a state, as a module would return it


@dataclass(frozen=True)
class Call:
    """One execution of one module; `start` and `end` are ticks of a common clock."""

    path: str
    module: nn.Module
    start: int
    end: int
    takes: Tensor | None
    gives: Tensor | None

    def contains(self, other: "Call") -> bool:
        """True if `other` ran inside this call."""
        return self.start < other.start and other.end < self.end


def state_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Which argument is the state: the first tensor by place, else `hidden_states`."""
    for place, value in enumerate(args):
        if isinstance(value, Tensor):
            return place
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return "hidden_states"
    return next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)


def state_taken(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The state that a module is called with."""
    place = state_place(args, kwargs)
    found = args[place] if isinstance(place, int) else kwargs.get(place or "")
    return found if isinstance(found, Tensor) else None


def state_given(output: Any) -> Tensor | None:
    """The state that a module returns: the output itself, or the first tensor in it."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((value for value in output if isinstance(value, Tensor)), None)
    return None


def bare(state: Tensor) -> Tensor:
    """A module that returns the state alone."""
    return state


def shape_of(output: Any, module: str = "a module") -> Shape:
    """How a module returns its state; beside it may stand weights and the like, which are None."""
    if isinstance(output, Tensor):
        return bare
    state = state_given(output)
    if state is None or type(output) not in (tuple, list):
        raise ModelRefused(
            f"{module} returns a {type(output).__name__}; a tensor or a tuple with one was wanted, "
            "so nothing can stand in for it"
        )
    kind, place, length = type(output), [v is state for v in output].index(True), len(output)
    return lambda state: kind(state if at == place else None for at in range(length))


@torch.no_grad()
def trace(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[list[Call], Any]:
    """Every call of one forward pass in order of start, and the model's output."""
    calls: list[Call] = []
    open_calls: list[tuple[nn.Module, int, Tensor | None]] = []
    clock = 0

    def copy(value: Tensor | None) -> Tensor | None:
        # Some blocks add in place, so what was seen must be kept apart from what follows.
        return None if value is None else value.detach().clone()

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal clock
        clock += 1
        open_calls.append((module, clock, copy(state_taken(args, kwargs))))

    def leaving(path: str, module: nn.Module, output: Any) -> None:
        nonlocal clock
        clock += 1
        opened, start, taken = open_calls.pop()
        if opened is module:
            calls.append(Call(path, module, start, clock, taken, copy(state_given(output))))

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            before = module.register_forward_pre_hook(entering, with_kwargs=True)
            hooks.callback(before.remove)
            after = module.register_forward_hook(
                lambda module, _, output, path=path: leaving(path, module, output)
            )
            hooks.callback(after.remove)
        output = model(**inputs)
    return sorted(calls, key=lambda call: call.start), output
