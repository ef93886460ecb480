"""The studies, by name: `ll.studies`.

In: a name. Out: the study, imported when it is first used. `BUILT_IN` lists those of the library. A
distribution adds its studies through the entry point group `layerleap.studies`, as
`layerleap-papers` does; from a script or a notebook, call `register`.
"""

import ast
import importlib.util
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerleap.errors import BadSettings

if TYPE_CHECKING:
    from layerleap.study.engine import Study

__all__ = ["find", "names", "register", "summary"]

GROUP = "layerleap.studies"
BUILT_IN = {"suitability": "layerleap.study.suitability:STUDY"}
PAPERS = ("shortcuts", "saturation", "embedding", "sparsity", "stitching", "icl")
INSTALL = "the studies of papers are installed with: pip install 'layerleap[papers]'"
_ADDED: dict[str, "Study[Any]"] = {}


@cache
def _installed() -> dict[str, EntryPoint]:
    """Entry points of studies: those of papers in their order, others, and the library's own."""
    order = {name: number for number, name in enumerate(PAPERS)}
    installed = sorted(entry_points(group=GROUP), key=lambda point: order.get(point.name, 99))
    built_in = [EntryPoint(name, value, GROUP) for name, value in BUILT_IN.items()]
    return {point.name: point for point in (*installed, *built_in)}


def names() -> list[str]:
    """The names of all studies."""
    return [*_installed(), *_ADDED]


def summary(name: str) -> str:
    """One line on what a study asks: the first of its module's docstring, which is not imported."""
    if name in _ADDED:
        return _ADDED[name].help.split("\n")[0]
    if name not in _installed():
        return INSTALL
    spec = importlib.util.find_spec(_installed()[name].module)
    if spec is None or spec.origin is None:
        return ""
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text("utf8"))) or ""
    return docstring.split("\n")[0]


def find(name: str) -> "Study[Any]":
    """The study of that name."""
    if name in _ADDED:
        return _ADDED[name]
    if name not in _installed():
        more = f"; {INSTALL}" if name in PAPERS else ""
        raise BadSettings(f"no study is called {name!r}; choose from {', '.join(names())}{more}")
    study: Study[Any] = _installed()[name].load()
    return study


def register(study: "Study[Any]") -> "Study[Any]":
    """Add a study: it then has a command, a report and a name in `ll.studies`."""
    if study.name in _installed():
        raise BadSettings(f"there is a study called {study.name!r} already; choose another name")
    _ADDED[study.name] = study
    return study


def __getattr__(name: str) -> "Study[Any]":
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return find(name)
    except BadSettings as error:
        raise AttributeError(str(error)) from None


def __dir__() -> list[str]:
    return sorted({*__all__, *names()})
