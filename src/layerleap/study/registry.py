"""The studies, by name: `ll.studies`.

In: a name. Out: the study, imported when it is first used. To add a study, enter it here, or call
`register` from anywhere.
"""

import importlib
from typing import TYPE_CHECKING, Any

from layerleap.errors import BadSettings

if TYPE_CHECKING:
    from layerleap.study.embedding import STUDY as embedding
    from layerleap.study.engine import Study
    from layerleap.study.icl import STUDY as icl
    from layerleap.study.saturation import STUDY as saturation
    from layerleap.study.shortcuts import STUDY as shortcuts
    from layerleap.study.sparsity import STUDY as sparsity
    from layerleap.study.stitching import STUDY as stitching

__all__ = [
    "embedding", "find", "icl", "names", "register", "saturation", "shortcuts", "sparsity",
    "stitching",
    "summary",
]  # fmt: skip

# Module with a `STUDY`, and one line for the list of commands, so that none has to be imported.
_BUILT_IN = {
    "shortcuts": ("layerleap.study.shortcuts", "How well can each layer predict later ones?"),
    "saturation": ("layerleap.study.saturation", "Do ranks saturate in order?"),
    "embedding": (
        "layerleap.study.embedding",
        "Do parameters read in the vocabulary mean anything?",
    ),
    "sparsity": ("layerleap.study.sparsity", "How few keys and neurons does a model need?"),
    "stitching": ("layerleap.study.stitching", "Can two models be joined by their vocabulary?"),
    "icl": ("layerleap.study.icl", "Does showing examples change a model as training would?"),
}
_ADDED: dict[str, "Study[Any]"] = {}


def names() -> list[str]:
    """The names of all studies."""
    return [*_BUILT_IN, *_ADDED]


def summary(name: str) -> str:
    """One line on what a study asks."""
    return _BUILT_IN[name][1] if name in _BUILT_IN else find(name).help.split("\n")[0]


def find(name: str) -> "Study[Any]":
    """The study of that name."""
    if name in _ADDED:
        return _ADDED[name]
    if name not in _BUILT_IN:
        raise BadSettings(f"no study is called {name!r}; choose from {', '.join(names())}")
    study: Study[Any] = importlib.import_module(_BUILT_IN[name][0]).STUDY
    return study


def register(study: "Study[Any]") -> "Study[Any]":
    """Add a study: it then has a command, a report and a name in `ll.studies`."""
    if study.name in _BUILT_IN:
        raise BadSettings(f"there is a study called {study.name!r} already; choose another name")
    _ADDED[study.name] = study
    return study


if not TYPE_CHECKING:  # else a type checker would take any mistyped name for an Any

    def __getattr__(name: str) -> Any:
        if name in names():
            return find(name)
        raise AttributeError(f"there is no study {name!r}; choose from {', '.join(names())}")


def __dir__() -> list[str]:
    return sorted({*__all__, *names()})
