"""A short `repr` for dataclasses that hold tensors and tables."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

FEW = 4  # entries that are listed one by one
LONGEST = 60  # characters of any other value


class ShortRepr:
    """Prints the shapes of tensors and the sizes of tables; for `@dataclass(repr=False)`."""

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        known = (
            f"{name}={short_repr(value)}" for name, value in values.items() if value is not None
        )
        return f"{type(self).__name__}({', '.join(known)})"


def short_repr(value: Any) -> str:
    """The value in a few words."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{' x '.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}>"
    if isinstance(value, Mapping):
        if len(value) > FEW:
            return f"<{len(value)} entries>"
        return "{" + ", ".join(f"{k!r}: {short_repr(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        if len(value) > FEW:
            return f"<{len(value)} items>"
        return f"[{', '.join(map(short_repr, value))}]"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
