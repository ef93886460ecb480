"""Plain: dataclasses that become plain JSON types, with some of their properties."""

from dataclasses import fields
from typing import Any, ClassVar


class Plain:
    """A dataclass whose `to_dict` has the properties in `SHOWN`, then every field."""

    SHOWN: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = (field.name for field in fields(self))  # type: ignore[arg-type]
        return {name: plain(getattr(self, name)) for name in (*self.SHOWN, *names)}


def plain(value: Any) -> Any:
    """A value of a field, and everything inside it, as plain JSON types."""
    if isinstance(value, Plain):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value
