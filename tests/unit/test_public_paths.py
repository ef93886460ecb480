"""A string wherever a path is, in all that `layerleap` makes public."""

import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import layerleap as ll
from tiny_models import sentences, tiny


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, constructor and method, and those of the namespaces."""
    for name in ll.__all__:
        thing = getattr(ll, name)
        if isinstance(thing, types.ModuleType):
            inside = getattr(thing, "__all__", [])
            for each in inside:
                yield from _functions(f"{name}.{each}", getattr(thing, each))
        else:
            yield from _functions(name, thing)
    from layerleap.lens.lens import read

    yield "read", read


def _functions(name: str, thing: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    if inspect.isfunction(thing):
        yield name, thing
    elif inspect.isclass(thing):
        for own, member in inspect.getmembers(thing):
            member = inspect.unwrap(member) if callable(member) else member
            if own == "__init__" or not own.startswith("_"):
                function = getattr(member, "__func__", member)
                if inspect.isfunction(function) and function.__module__.startswith("layerleap"):
                    yield f"{name}.{own}", function


def kinds(hint: Any) -> set[str]:
    """The names of the types that an annotation allows, also as items of a list or dictionary."""
    return set(
        re.findall(r"\w+", hint if isinstance(hint, str) else inspect.formatannotation(hint))
    )


FUNCTIONS = dict(public_functions())


def test_where_a_path_is_taken_a_string_is_taken_too():
    taken = {
        f"{name}({parameter.name})": kinds(parameter.annotation)
        for name, function in FUNCTIONS.items()
        for parameter in inspect.signature(function).parameters.values()
    }
    assert "load(source)" in taken, sorted(taken)
    assert [
        place for place, allowed in taken.items() if "Path" in allowed and "str" not in allowed
    ] == []


def test_files_of_statistics_may_be_named_by_strings(tmp_path):
    model, texts = tiny(), sentences(8)
    files = [str(tmp_path / f"shard{number}.safetensors") for number in range(2)]
    for number, file in enumerate(files):
        ll.stats.collect(model, texts, shard=(number, 2), checkpoint=f"{file}.part").save(file)
        ll.stats.finish(f"{file}.part")
    merged = ll.stats.merge(files)
    states = str(tmp_path / "states")
    whole = ll.stats.collect(model, texts, save_states=states)
    assert merged.fit.n == whole.fit.n
    assert len(ll.stats.StateFile(states).open()) == whole.fit.n
    merged.save(str(tmp_path / "merged.safetensors"))
    assert ll.stats.FitStatistics.load(str(tmp_path / "merged.safetensors")).fit.n == whole.fit.n
    assert not list(tmp_path.glob("*.part"))
