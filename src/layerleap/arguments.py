"""Arguments of public functions, checked against their annotations.

In: a function, or the fields of a dataclass. Out: a `BadSettings` in one line for the first value
whose type or choice is wrong; without it, the error would come from deep inside, or not at all.
"""

import functools
import inspect
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from layerleap.errors import BadSettings, UnknownArgument, check_choice, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "True or False",
    types.NoneType: "None",
    "Transformer": "a model from ll.load",
    "Rule": "an exit rule such as ll.exits.Similarity(0.98)",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which first checks the type of each argument and every choice."""

    @functools.wraps(function)
    def with_checks(*args: P.args, **kwargs: P.kwargs) -> R:
        signature, hints = _annotations(function)
        check_names(function.__name__, kwargs, signature.parameters)
        with suppress(TypeError):  # Python itself says best which argument is missing or unknown
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                if name in hints:
                    _check(value, hints[name], name)
        return function(*args, **kwargs)

    return with_checks


def check_names(name: str, given: Iterable[str], known: Mapping[str, Any]) -> None:
    """Refuse an argument that a function does not have, and name the nearest one.

    A function that passes the rest on to another is left alone.
    """
    rest = inspect.Parameter.VAR_KEYWORD
    if any(getattr(parameter, "kind", None) is rest for parameter in known.values()):
        return
    for argument in given:
        if argument not in known:
            raise UnknownArgument(
                f"{name} got an unexpected keyword argument {argument!r}; expected some of "
                f"{', '.join(known)}{did_you_mean(argument, known)}"
            )


def check_fields(settings: Any) -> None:
    """Check the fields of a dataclass; for `__post_init__`."""
    for name, hint in get_type_hints(type(settings)).items():
        _check(getattr(settings, name), hint, name)


@functools.cache
def _annotations(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    signature = inspect.signature(function)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = {name for name, p in signature.parameters.items() if p.kind not in several}
    return signature, {k: v for k, v in get_type_hints(function).items() if k in single}


def _check(value: Any, hint: Any, name: str) -> None:
    if _fits(value, hint):
        return
    kinds = [kind for kind in _alternatives(hint) if kind is not types.NoneType]
    if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
        check_choice(value, kinds[0], name)
    shown = reprlib.repr(value) if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
    raise BadSettings(f"{name} is {shown}; expected {_described(hint)}")


_PLAIN = (str, bytes, Real, list, tuple, dict, set, types.NoneType)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """False if the value is certainly not what the annotation says."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if len(_alternatives(hint)) > 1:
        return any(_fits(value, kind) for kind in inside)
    if origin is Literal:
        return isinstance(value, str) and value in inside
    if hint in (int, float):
        kind = Integral if hint is int else Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        if isinstance(value, list | tuple) and len(set(inside) - {...}) == 1:
            return all(_fits(item, inside[0]) for item in value)
        return isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if isinstance(hint, type) and not getattr(hint, "_is_protocol", False) and origin is None:
        return isinstance(value, hint)
    return True


def _described(hint: Any) -> str:
    origin, inside = get_origin(hint), get_args(hint)
    if len(_alternatives(hint)) > 1:
        return " or ".join(dict.fromkeys(map(_described, inside)))
    if origin is Literal:
        return ("one of " if len(inside) > 1 else "") + ", ".join(map(repr, inside))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a dictionary"
    if isinstance(origin, type) and issubclass(origin, Iterable) and inside:
        items = _described(inside[0])
        is_simple = inside[0] in (int, float, str)
        return f"a list of {items.removeprefix('a ')}s" if is_simple else f"a list, each {items}"
    name = getattr(hint, "__name__", str(hint))
    return WORDS.get(hint) or WORDS.get(name) or f"a {name}"
