"""What could not be compared and why, in a few lines."""

from collections.abc import Mapping

FEW = 3


def listed(missing: Mapping[str, str]) -> list[str]:
    """The first few of them, one a line, and how many more there are."""
    lines = [f"{name}: {reason}" for name, reason in missing.items()]
    more = len(lines) - FEW
    return lines if more <= 0 else [*lines[:FEW], f"and {more} more that could not be compared"]
