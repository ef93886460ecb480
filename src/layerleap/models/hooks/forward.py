"""The only code that hooks or replaces a module's forward.

In: a model and taps, each a few functions to run at one module.
Out: the model with the taps in place, inside a `with` block, on this thread only.

Each model has one re-entrant lock, held while anything is tapped: other threads that want to tap
the same model wait. Plain calls on other threads neither wait nor notice. A tapped module runs

    change_input -> see_input -> forward (or `replace`) -> change_output -> see_output

inside `around`, and all of this after pre-hooks and before forward hooks of others; only
`change_last` and `see_output` come after these. With other `parameters`, forward runs on a copy of
the module that has them, and the module itself keeps its own. So observers see values after all
edits, in whatever order the two were set up. Nothing is stored on the model, so locks and taps are
never copied or pickled with it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from threading import Lock, RLock, get_ident
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Forward = Callable[..., Any]
Parameters = Mapping[str, Tensor]  # of one module, by its own name for them


class StopPass(Exception):
    """Raised inside a forward pass once everything that was asked for is known."""


@dataclass(eq=False)  # not frozen: a decoder creates hundreds per text
class Tap:
    """What to run at one module. All but `forward` run only on the thread that set the tap."""

    see_input: Callable[[Args, Kwargs], None] | None = None
    see_output: Callable[[Any], None] | None = None
    change_input: Callable[[Args, Kwargs], tuple[Args, Kwargs]] | None = None
    change_output: Callable[[Any], Any] | None = None
    change_last: Callable[[Any], Any] | None = None  # after the forward hooks of others
    # What to run instead of forward in this call, or None; the tap set last decides first.
    replace: Callable[[], Forward | None] | None = None
    # Called as around(forward, args, kwargs); the tap set last is the outermost.
    around: Callable[[Forward, Args, Kwargs], Any] | None = None
    forward: Forward | None = None  # another implementation of the module, used on every thread
    # What the module computes with instead of its parameters, given those it has, or those that
    # earlier taps gave it; only while `is_on`. It takes precedence over `forward`.
    parameters: Callable[[Parameters], Parameters] | None = None
    is_on: Callable[[], bool] = lambda: True

    @cached_property
    def is_piped(self) -> bool:
        """True if forward becomes one step of several."""
        steps = (self.see_input, self.change_input, self.change_output, self.replace)
        return any(step is not None for step in steps)

    @property
    def is_inside(self) -> bool:
        """True if forward has to be replaced, because a hook after it is not enough."""
        others = (self.forward, self.around, self.parameters)
        return self.is_piped or any(other is not None for other in others)


class _TappedModule:
    """One module with its taps."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # accelerate keeps a forward in the instance, which has to come back.
        self.instance_forward = module.__dict__.get("forward")
        self.original: Forward = module.forward
        self.taps: dict[Tap, list[RemovableHandle]] = {}
        self._reweighted: tuple[list[Tap], Forward | None] = [], None

    def add(self, tap: Tap) -> None:
        # Hooks, not part of forward: hooks of others may change the output first.
        self.taps[tap] = [
            self.module.register_forward_hook(_on_this_thread(function))
            for function in (tap.change_last, tap.see_output)
            if function is not None
        ]
        if tap.is_inside:
            self._install()

    def remove(self, tap: Tap) -> None:
        for handle in self.taps.pop(tap, ()):
            handle.remove()
        if tap.is_inside:
            self._install()

    def _install(self) -> None:
        own, forward = self.module.__dict__, self.original
        for tap in self.taps:
            forward = tap.forward or forward
        forward = self._with_parameters(forward)
        piped = [tap for tap in self.taps if tap.is_piped]
        if piped:
            forward = _piped(forward, self.original, piped)
        for tap in self.taps:
            if tap.around is not None:
                forward = _wrapped(forward, self.original, tap.around)
        if forward is not self.original:
            own["forward"] = forward
        elif self.instance_forward is not None:
            own["forward"] = self.instance_forward
        else:
            own.pop("forward", None)

    def _with_parameters(self, forward: Forward) -> Forward:
        """The forward of a copy of the module with the parameters that taps give it."""
        taps = [tap for tap in self.taps if tap.parameters is not None]
        if taps != self._reweighted[0]:
            self._reweighted = taps, _reweighted(self.module, taps) if taps else None
        other, thread = self._reweighted[1], get_ident()
        if other is None:
            return forward

        def reweighted(*args: Any, **kwargs: Any) -> Any:
            is_on = get_ident() == thread and all(tap.is_on() for tap in taps)
            return (other if is_on else forward)(*args, **kwargs)

        return reweighted


def _reweighted(module: nn.Module, taps: list[Tap]) -> Forward:
    values: dict[str, Any] = dict(module._parameters)
    for tap in taps:
        if tap.parameters is not None:
            values |= tap.parameters(values)
    shadow = copy(module)  # shares all but the parameters
    shadow.__dict__.pop("forward", None)
    shadow.__dict__["_parameters"] = values
    return shadow.forward


def _on_this_thread(function: Callable[[Any], Any]) -> Callable[..., Any]:
    thread = get_ident()

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return function(output) if get_ident() == thread else None

    return hook


def _piped(forward: Forward, original: Forward, taps: list[Tap]) -> Forward:
    thread = get_ident()
    changes = [tap.change_input for tap in taps if tap.change_input is not None]
    sees = [tap.see_input for tap in taps if tap.see_input is not None]
    afters = [tap.change_output for tap in taps if tap.change_output is not None]
    replaces = [tap.replace for tap in reversed(taps) if tap.replace is not None]

    def piped(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return original(*args, **kwargs)
        instead = None
        for replace in replaces:
            if (instead := replace()) is not None:
                break
        else:
            for change in changes:
                args, kwargs = change(args, kwargs)
        for see in sees:
            see(args, kwargs)
        output = (forward if instead is None else instead)(*args, **kwargs)
        for after in afters:
            output = after(output)
        return output

    piped.__wrapped__ = original  # type: ignore[attr-defined]  # `generate` asks for its signature
    return piped


def _wrapped(
    forward: Forward, original: Forward, around: Callable[[Forward, Args, Kwargs], Any]
) -> Forward:
    thread = get_ident()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return original(*args, **kwargs)
        return around(forward, args, kwargs)

    wrapped.__wrapped__ = original  # type: ignore[attr-defined]
    return wrapped


def code_of(module: nn.Module) -> tuple[Any, Any]:
    """What the class of a module runs; a class derived from it may run the same."""
    return type(module).forward, type(module).__call__


class ModelHooks:
    """The lock of one model, its tapped modules, and the edits in force (see `edit`)."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.edits: Any = None
        # By module, the code of its class when the model was last verified.
        self.verified: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()
        self._modules: dict[nn.Module, _TappedModule] = {}

    def remember(self, model: nn.Module) -> None:
        """Keep the code of all classes: `model` was verified with it."""
        self.verified = WeakKeyDictionary((one, code_of(one)) for one in model.modules())

    def add(self, module: nn.Module, tap: Tap) -> None:
        """Put one tap in place; the caller holds the lock."""
        if module not in self._modules:
            self._modules[module] = _TappedModule(module)
        self._modules[module].add(tap)

    def remove(self, module: nn.Module, tap: Tap) -> None:
        """Take one tap away, if it is there."""
        if (tapped := self._modules.get(module)) is not None:
            tapped.remove(tap)
            if not tapped.taps:
                del self._modules[module]

    def original(self, module: nn.Module) -> Forward:
        """The forward that the module has without any taps."""
        tapped = self._modules.get(module)
        return module.forward if tapped is None else tapped.original

    def instance_forward(self, module: nn.Module) -> Forward | None:
        """The forward that another library put into this very module; None if there is none."""
        tapped = self._modules.get(module)
        return module.__dict__.get("forward") if tapped is None else tapped.instance_forward

    def is_reweighted(self, module: nn.Module) -> bool:
        """True if the module computes with other parameters than its own."""
        tapped = self._modules.get(module)
        return tapped is not None and any(tap.parameters is not None for tap in tapped.taps)


_HOOKS: "WeakKeyDictionary[nn.Module, ModelHooks]" = WeakKeyDictionary()
_CREATING = Lock()


def hooks_of(model: nn.Module) -> ModelHooks:
    """The lock and taps of a model: the same object for every wrapper and thread."""
    with _CREATING:
        if model not in _HOOKS:
            _HOOKS[model] = ModelHooks()
        return _HOOKS[model]


class _Stances:
    """How many blocks of all threads run compiled code as plain Python, and the way back."""

    def __init__(self) -> None:
        self._lock, self._n, self._stance = Lock(), 0, None

    def enter(self) -> None:
        with self._lock:
            if not self._n:
                self._stance = torch.compiler.set_stance("force_eager")
            self._n += 1

    def leave(self) -> None:
        with self._lock:
            self._n -= 1
            if not self._n and self._stance is not None:
                self._stance.__exit__(None, None, None)


_STANCES = _Stances()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what `torch.compile` compiled as plain Python, on all threads.

    Compiled code knows nothing of taps, or is compiled again for each; after a few times PyTorch
    gives up, and the model would stay uncompiled for good.
    """
    if "torch._dynamo" not in sys.modules:  # then nothing was compiled, and importing it is slow
        yield
        return
    _STANCES.enter()
    try:
        yield
    finally:
        _STANCES.leave()


T = TypeVar("T")


class once(Generic[T]):
    """A property of an object with a `transformer`, computed once, under the model's lock.

    `cached_property` of Python 3.11 takes a lock of its own first. A thread that holds it and waits
    for the model would then wait forever for one that holds the model and asks for the property.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        """The value; from the second time on, Python finds it in the instance."""
        name = self.compute.__name__
        with hooks_of(instance.transformer.model).lock:
            if name not in instance.__dict__:
                instance.__dict__[name] = self.compute(instance)
            value: T = instance.__dict__[name]
            return value


@contextmanager
def tapped(
    model: nn.Module, taps: Mapping[nn.Module, Tap] | Iterable[tuple[nn.Module, Tap]]
) -> Iterator[None]:
    """Put taps on modules of `model` and hold its lock; both end with the `with` block.

    A thread that taps several models at once should take them in the same order as others do.
    """
    hooks = hooks_of(model)
    pairs = list(taps.items() if isinstance(taps, Mapping) else taps)
    with hooks.lock, uncompiled():
        try:
            for module, tap in pairs:
                hooks.add(module, tap)
            yield
        finally:
            for module, tap in reversed(pairs):
                hooks.remove(module, tap)
