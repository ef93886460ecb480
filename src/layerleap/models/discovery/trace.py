"""One forward pass, call by call: which module ran when, what it took and what it gave.

In: a model and a small probe input.
Out: a list of calls in order of execution, from which `structure` and `sites` infer the
architecture; and how to find and replace the state among a module's arguments and outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.hooks.forward import Tap, tapped

Shape = Callable[[Tensor], Any]  # wraps a state the way a module returns it


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
    """Which argument is the state: the first positional tensor, else `hidden_states`."""
    for place, value in enumerate(args):
        if isinstance(value, Tensor):
            return place
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return "hidden_states"
    return next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)


def state_taken(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The state that a module is called with."""
    return None if state_place(args, kwargs) is None else required_state(args, kwargs)[1]


def required_state(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor]:
    """Where the state is among the arguments, and the state; `ModelRefused` if there is none."""
    place = state_place(args, kwargs)
    if place is None:
        raise ModelRefused("a module was called without a state to edit or to run again")
    return place, args[place] if isinstance(place, int) else kwargs[place]


def with_state(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int | str, state: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another state at `place`."""
    if isinstance(place, int):
        return (*args[:place], state, *args[place + 1 :]), dict(kwargs)
    return args, {**kwargs, place: state}


def state_given(output: Any) -> Tensor | None:
    """The state that a module returns: the output, or the first tensor in it."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return next((value for value in output if isinstance(value, Tensor)), None)
    return None


def with_output(output: Any, state: Tensor, value: Tensor) -> Any:
    """The same output with `value` in place of the state that it holds."""
    if output is state:
        return value
    if isinstance(output, tuple | list):
        return type(output)(value if item is state else item for item in output)
    return type(output)({k: value if item is state else item for k, item in output.items()})


def shape_of(output: Any, module: str = "a module") -> Shape:
    """How a module returns its state; other items (attention weights and the like) become None."""
    if isinstance(output, Tensor):
        return lambda state: state
    state = state_given(output)
    if state is None or type(output) not in (tuple, list):
        raise ModelRefused(
            f"{module} returns a {type(output).__name__}; expected a tensor, or a tuple that holds "
            "one, so this module cannot be replaced"
        )
    kind, place, length = type(output), [v is state for v in output].index(True), len(output)
    return lambda state: kind(state if at == place else None for at in range(length))


@torch.no_grad()
def trace(model: nn.Module, inputs: Mapping[str, Any], within: str = "") -> tuple[list[Call], Any]:
    """Every call of one forward pass in order of start, and the model's output.

    Only the module at the path `within` and those inside it are traced; all when "".
    """
    calls: list[Call] = []
    open_calls: list[tuple[nn.Module, int, Tensor | None]] = []
    clock = 0

    def copy(value: Tensor | None) -> Tensor | None:
        # Some blocks add in place, which would change a tensor after it was recorded.
        return None if value is None else value.detach().clone()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal clock
        clock += 1
        open_calls.append((module, clock, copy(state_taken(args, kwargs))))

    def leave(path: str, module: nn.Module, output: Any) -> None:
        nonlocal clock
        clock += 1
        opened, start, taken = open_calls.pop()
        if opened is module:
            calls.append(Call(path, module, start, clock, taken, copy(state_given(output))))

    def tap(path: str, module: nn.Module) -> Tap:
        return Tap(
            see_input=lambda args, kwargs: enter(module, args, kwargs),
            see_output=lambda output: leave(path, module, output),
        )

    modules = {
        module: tap(path, module)
        for path, module in model.named_modules()
        if not within or path == within or path.startswith(f"{within}.")
    }
    with tapped(model, modules):
        output = model(**inputs)
    return sorted(calls, key=lambda call: call.start), output
