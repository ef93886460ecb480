"""Read: what every layer of a model would say.

A lens is a map to the last layer followed by the model's own tail. Calling this package,
`ll.read(model, text)`, reads one text through a bank; see `read_text`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """Importing anything below `layerleap.read` binds this package to the name `ll.read`.

    So the package itself has to be what `ll.read(...)` calls.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from layerleap.read.lens import read_text

        return read_text(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
