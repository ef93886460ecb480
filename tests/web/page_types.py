"""The types of requests and answers for the page's modules, as JSDoc for TypeScript's checker.

    python tests/web/page_types.py

In: the models of `schemas`, `frames` and `requests`. Out: `static/types.js`; a test compares them.
"""

import inspect
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from layerleap.show.web import frames, requests, schemas

TARGET = Path(schemas.__file__).with_name("static") / "types.js"
HEAD = """// @ts-check
// What the page sends and gets; a number that is not finite arrives as null.
// Written by `python tests/web/page_types.py`: do not edit.
"""
PLAIN = {
    int: "number",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
    Any: "any",
}
MODULES = (schemas, frames, requests)
UNIONS = {  # those with a name
    "BuildState": schemas.BuildState,
    "Side": frames.Side,
    "TextSide": frames.TextSide,
    "TraceFrame": frames.TraceFrame,
    "GenerateFrame": frames.GenerateFrame,
}


def definitions() -> str:
    """The text of `static/types.js`."""
    unions = (_typedef(name, _type(kind, named=False)) for name, kind in UNIONS.items())
    classes = (_class(model) for module in MODULES for model in _classes(module))
    return "\n".join([HEAD, *unions, *classes, "export {};\n"])


def _classes(module: Any) -> Iterator[type]:
    """The models and named tuples that a module defines, in its order."""
    for value in vars(module).values():
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        if is_own and value not in (schemas.Answer, requests.Body):
            yield value


def _name(model: type) -> str:
    return model.__name__ + ("Request" if model.__module__ == requests.__name__ else "")


def _class(model: type) -> str:
    about = inspect.cleandoc(model.__doc__ or "").partition("\n")[0]
    if not issubclass(model, BaseModel):
        parts = (f"{name}: {_type(kind)}" for name, kind in get_type_hints(model).items())
        return _typedef(_name(model), f"[{', '.join(parts)}]", about)
    fields = (
        f"{field.alias or name}{'' if _is_given(model, name) else '?'}: {_type(field.annotation)}"
        for name, field in model.model_fields.items()
    )
    return _typedef(_name(model), f"{{{', '.join(fields)}}}", about)


def _is_given(model: type[BaseModel], name: str) -> bool:
    """Whether a field is always there: an answer has all of its fields."""
    return issubclass(model, schemas.Answer) or model.model_fields[name].is_required()


def _typedef(name: str, kind: str, about: str = "") -> str:
    return f"/** {f'{about} ' if about else ''}@typedef {{{kind}}} {name} */"


def _type(kind: Any, *, named: bool = True) -> str:
    """A type of Python as one of TypeScript."""
    for name, union in UNIONS.items():
        if named and kind == union:
            return name
    if kind in PLAIN:
        return PLAIN[kind]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is None and inspect.isclass(kind):
        return _name(kind)
    if origin is Annotated:
        return _type(inside[0])
    if origin is Literal:
        return "|".join(map(json.dumps, inside))
    if origin in (Union, types.UnionType):
        return "|".join(map(_type, inside))
    return _container(kind, origin, inside)


def _container(kind: Any, origin: Any, inside: tuple[Any, ...]) -> str:
    if origin is list:
        item = _type(inside[0])
        return f"({item})[]" if "|" in item else f"{item}[]"
    if origin is dict:
        return f"Record<string, {_type(inside[1])}>"
    raise TypeError(f"{kind} has no type on the page yet; teach `_container` about it")


if __name__ == "__main__":
    TARGET.write_text(definitions(), encoding="utf8")
