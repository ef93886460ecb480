"""Which intervals of a result, at any depth, do not contain their estimate."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

# What an interval belongs to, where its ends have no name of their own.
ESTIMATES = ("value", "r2", "disagreement", "saved", "agreement", "share", "difference", "speed")
# Ranges of null distributions, which contain no estimate.
NULLS = ("null", "exchangeable")


def intervals(result: Any) -> Iterator[tuple[str, float, float, float]]:
    """Every interval with its estimate: (name, low, estimate, high)."""
    if is_dataclass(result) and not isinstance(result, type):
        result = asdict(result)
    if isinstance(result, Mapping):
        yield from _own(result)
        for value in result.values():
            yield from intervals(value)
    elif isinstance(result, list | tuple):
        for value in result:
            yield from intervals(value)


def _own(row: Mapping[str, Any]) -> Iterator[tuple[str, float, float, float]]:
    for key in row:
        if not isinstance(key, str) or not key.endswith("low") or key.startswith(NULLS):
            continue
        before = key.removesuffix("low")
        unnamed = [name for name in ESTIMATES if f"{name}_low" not in row]
        names = [before.rstrip("_ "), f"{before}value"] if before else unnamed
        name = next((name for name in names if name in row), None)
        assert name is not None, (key, sorted(row))
        ends = row[key], row[name], row[f"{before}high"]
        if None not in ends:
            yield (name, *ends)


def require_inside(result: Any, at_least: int = 1) -> None:
    """Every estimate lies inside its own interval, and there are some."""
    found = list(intervals(result))
    assert len(found) >= at_least
    for name, low, value, high in found:
        slack = 1e-9 * max(1.0, abs(value))  # an end computed twice may round differently
        assert low - slack <= value <= high + slack, (name, low, value, high)
