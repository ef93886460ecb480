"""Libraries of the `report` extra, imported only when a picture or a page is made.

In: the name of a module. Out: the module, or one sentence that says how to get it.
"""

import importlib
from typing import Any

from layerleap.errors import CannotFetch


def report_library(name: str) -> Any:
    """The module `name`; when it is not installed, a `CannotFetch` with the command to run."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        library = name.split(".")[0]
        raise CannotFetch(
            f"{library} is not installed and the report needs it; "
            'run: pip install "layerleap[report]"'
        ) from error
