"""Optional libraries, imported only when they are needed.

In: the name of a module, and the extra of pyproject.toml that installs it.
Out: the module, or an error that says how to install it.
"""

import importlib
import importlib.util
from functools import partial
from typing import Any

from layerleap.errors import CannotFetch

NEEDED_BY = {
    "report": "the report needs it",
    "learn": "calibrated and learned rules need it",
    "bundled": "images need it",
    "web": "the debugger needs it",
}


def library(name: str, extra: str, why: str = "") -> Any:
    """The module `name`; if it is not installed, a `CannotFetch` with the command to run."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name, extra, why) from error


def need(name: str, extra: str, why: str = "") -> None:
    """Raise the same error if the library is not installed, without importing it."""
    if importlib.util.find_spec(name.split(".")[0]) is None:
        raise _missing(name, extra, why)


def _missing(name: str, extra: str, why: str) -> CannotFetch:
    return CannotFetch(
        f"{name.split('.')[0]} is not installed and {why or NEEDED_BY[extra]}; "
        f'run: pip install "layerleap[{extra}]"'
    )


report_library = partial(library, extra="report")  # figures and pages
learn_library = partial(library, extra="learn")  # exact binomial tests and learned rules
