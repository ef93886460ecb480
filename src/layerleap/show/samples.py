"""How much a figure or a table rests on, in words."""

import math
from collections.abc import Iterable, Mapping
from typing import Any


def is_known(value: Any) -> bool:
    """True for a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def span(values: Iterable[Any]) -> str:
    """A count, or the range of counts: "3,000" or "1,000 to 3,000"; empty when unknown."""
    known = sorted({int(value) for value in values if is_known(value)})
    if not known:
        return ""
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def sample_size(rows: Iterable[Mapping[str, Any]], unit: str = "states") -> str:
    """The sample behind rows: "n = 3,000 states from 26 documents"; empty when unknown."""
    rows = list(rows)
    count, documents = (span(row.get(key) for row in rows) for key in ("rows", "documents"))
    if not count:
        return ""
    source = "1 document" if documents == "1" else f"{documents} documents"
    return f"n = {count} {unit}" + (f" from {source}" if documents else "")
