"""What others put on a model: hooks, and forwards that replace a module's own.

In: a model. Out: the modules with such code, for passes that cannot run it as `generate` would; or
the model without the hooks, on this thread, for facts about the model itself.

Hooks of transformers and accelerate do not count: they keep outputs, ask for gradients or move
tensors between devices, whichever rows a pass has. Neither do our own, nor those with which
torch's counters (of FLOPs, of memory) follow which module runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from layerleap.models.hooks.forward import Forward, code_of, hooks_of

IGNORED = ("accelerate", "transformers", "layerleap")
TRACKERS = ("torch.utils.module_tracker", "torch.distributed._tools.mod_tracker")  # only look on
NEEDED = ("torch", "deepspeed", "peft")  # theirs hold a model's weights together
PRE_HOOK, HOOK = "forward pre-hook", "forward hook"
KINDS = {"_forward_pre_hooks": PRE_HOOK, "_forward_hooks": HOOK}
# They call what they wrap under another mode: without gradients, or compiled.
WRAPPERS = ("torch._dynamo", "torch.utils._contextlib")
NAMED = 3  # modules that a message names


class _Silent:
    """A hook that does nothing on the thread that silenced it."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self.thread = hook, get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if get_ident() == self.thread else self.hook(*args, **kwargs)


@dataclass(frozen=True)
class Foreign:
    """One piece of code that somebody put on a module."""

    path: str  # of the module; empty for the model
    kind: str
    key: Any  # of a hook, its number, which is never used twice; else the code itself

    def __str__(self) -> str:
        return f"a {self.kind} on {self.path or 'the model'}"


def foreign_code(
    model: nn.Module, modules: Iterable[tuple[str, nn.Module]] | None = None
) -> tuple[Foreign, ...]:
    """The code of others on all modules of `model`, or on some of them, given with their paths."""
    hooks = hooks_of(model)
    code = [Foreign("every module", kind, key) for kind, key, _ in _hooks(torch_module, "_global")]
    for path, module in model.named_modules() if modules is None else modules:
        code += [Foreign(path, kind, key) for kind, key, _ in _hooks(module)]
        forward = hooks.instance_forward(module)
        if forward is not None and not _is_known(module, forward):
            code.append(Foreign(path, "replaced forward", forward))
        verified = hooks.verified.get(module)
        if verified is not None and verified != code_of(module):
            code.append(Foreign(path, "changed class", code_of(module)))
    return tuple(code)


def in_words(code: Sequence[Foreign]) -> str:
    """The first few of them; nothing if there are none."""
    parts = [str(one) for one in code[:NAMED]] or [""]
    if len(code) > NAMED:
        parts.append(f"{len(code) - NAMED} more")
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


@contextmanager
def unhooked(model: nn.Module, keep: Collection[Foreign] = ()) -> Iterator[None]:
    """Silence the hooks of others on this thread, all but `keep`, for facts about the model itself.

    Replaced forwards stay: a model may be nothing without them.
    """
    kept = {one.key for one in keep}
    with ExitStack() as undo:
        if foreign_code(model):
            undo.enter_context(hooks_of(model).lock)
        for module in model.modules():
            for _, key, hook in list(_hooks(module)):
                if key in kept or _home(hook) in NEEDED:
                    continue
                for own in (module._forward_pre_hooks, module._forward_hooks):
                    if own.get(key) is hook:
                        own[key] = _Silent(hook)  # in the same place
                        undo.callback(_put_back, own, key, hook)
        yield


def _put_back(own: dict[int, Callable[..., Any]], key: int, hook: Callable[..., Any]) -> None:
    if key in own:  # else it was removed meanwhile
        own[key] = hook


def _hooks(holder: Any, prefix: str = "") -> Iterator[tuple[str, int, Callable[..., Any]]]:
    """The hooks of others on one module: kind, number and function."""
    for name, kind in KINDS.items():
        for key, hook in list(getattr(holder, prefix + name).items()):
            is_other = isinstance(hook, _Silent) and hook.thread != get_ident()
            own = hook.hook if is_other else hook
            if _home(own) not in IGNORED and _module(own) not in TRACKERS:
                yield kind, key, hook


def _is_known(module: nn.Module, forward: Forward) -> bool:
    """True if a forward in the instance is the class's own, or one of a library around that."""
    if getattr(forward, "__func__", None) is type(module).forward:
        return True  # accelerate leaves it behind
    wrapped = module.__dict__.get("_old_forward")  # accelerate runs it between hooks of its own
    if _home(forward) == "accelerate" and wrapped is not None:
        hook = module.__dict__.get("_hf_hook")
        parts = getattr(hook, "hooks", (hook,))
        return _is_known(module, wrapped) and all(_home(one) == "accelerate" for one in parts)
    return _home(forward) in IGNORED


def _home(function: Any) -> str:
    """The package that a function, or the class of an object, was defined in."""
    return _module(function).split(".")[0]


def _module(function: Any) -> str:
    """Where the code is. `functools.wraps` copies the `__module__` of what it wraps, so it lies."""
    while True:
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        written_in = getattr(function, "__globals__", {}).get("__name__")
        if written_in is None:
            return str(getattr(function, "__module__", None) or type(function).__module__)
        inner = getattr(function, "__wrapped__", None)
        inner = getattr(function, "_torchdynamo_orig_callable", inner)
        if inner is None or not written_in.startswith(WRAPPERS):
            return str(written_in)
        function = inner
