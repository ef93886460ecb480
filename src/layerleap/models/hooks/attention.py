"""Attention functions replaced while the model runs.

In: a choice of function by attention module. Out: transformers' own lookup, which every model that
uses `AttentionInterface` goes through, gives that function inside a `with` block on this thread.

The lookup is a method shared by all models, so it is replaced only while it is in use, and
does what it always did for other models and threads. Masks stay as the model makes them for its own
attention implementation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

AttentionFunction = Callable[..., tuple[Any, Any]]
Choose = Callable[[nn.Module], AttentionFunction | None]  # None leaves a module its own function
Around = Callable[..., tuple[Any, Any]]  # called with the function, then as the function is

_LOOKUP: Any = AttentionInterface.get_interface
_SHARED = Lock()
_users = 0
_thread = local()


def _get_interface(self: Any, name: str, default: Any) -> AttentionFunction:
    own: AttentionFunction = _LOOKUP(self, name, default)
    choices: tuple[Choose, ...] = getattr(_thread, "choices", ())
    around: Around | None = getattr(_thread, "around", None)
    if not choices and around is None:
        return own

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        chosen = (choose(module) for choose in reversed(choices))  # the latest decides first
        function = next((one for one in chosen if one is not None), own)
        if around is None:
            return function(module, *args, **kwargs)
        return around(function, module, *args, **kwargs)

    return attend


@contextmanager
def attention_chosen_by(choose: Choose) -> Iterator[None]:
    """Ask `choose` for the attention function of every attention module that runs."""
    before: tuple[Choose, ...] = getattr(_thread, "choices", ())
    try:
        _count(1)
        _thread.choices = (*before, choose)
        yield
    finally:
        _thread.choices = before
        _count(-1)


@contextmanager
def attention_wrapped_by(around: Around) -> Iterator[None]:
    """Call every attention function, replaced or not, through `around`."""
    before: Around | None = getattr(_thread, "around", None)
    try:
        _count(1)
        _thread.around = around
        yield
    finally:
        _thread.around = before
        _count(-1)


def _count(change: int) -> None:
    global _users
    with _SHARED:
        _users += change
        lookup = _get_interface if _users else _LOOKUP
        AttentionInterface.get_interface = lookup


def unit_values(value: Tensor) -> Tensor:
    """Values for which attention gives its own weights: a unit vector per key, in every head.

    The output of an attention function is linear in the values that it is given, which are
    (row, head, key, width).
    """
    keys = torch.eye(value.shape[2], dtype=value.dtype, device=value.device)
    return keys.expand(*value.shape[:2], -1, -1)
