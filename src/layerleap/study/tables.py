"""Tables of a study, described as data: which rows to show, and how each column is written.

In: a finished study. Out: columns that the report and the terminal lay out, whatever study it is.
"""

from collections.abc import Mapping
from typing import Any

from layerleap.results.columns import (
    GOOD_OR_BAD as GOOD_OR_BAD,
    Column as Column,
    Row as Row,
    Table as Table,
    estimate as estimate,
)

SMALLEST_P = 1e-300  # the smallest p-value that is told apart: floats end soon after


def percent(share: float, digits: int | None = None) -> str:
    """A share as it is written in sentences: 0.381 is "38 %", 0.0042 is "0.4 %"."""
    if digits is None:
        digits = 1 if 0 < abs(share) < 0.01 else 0
    return f"{100 * share:.{digits}f} %"


def bounded(p: float) -> float:
    """A p-value that never underflows to 0: what is below `SMALLEST_P` becomes that bound."""
    return max(p, SMALLEST_P)


def p_words(p: float) -> str:
    """A p-value as it is written in sentences."""
    return f"p < {SMALLEST_P:g}" if p <= SMALLEST_P else f"p = {p:.2g}"


def in_words(
    row: Mapping[str, Any] | None, form: str = ".2f", unit: str = "", unknown: str = "unknown"
) -> str:
    """An estimate as it is written in sentences: "0.12 nats (0.10 to 0.15)".

    Args:
        row: with `value`, `low` and `high`.
        form: of all three, as in a format; with "%" they are shares, written as percentages with
            as many digits as `percent` gives, or as the form says (".1%").
        unit: written after the value.
        unknown: what is written where there is no value.
    """
    if row is None or row["value"] is None:
        return unknown
    text = _formed(row["value"], form) + (f" {unit}" if unit else "")
    return text + ends_in_words(row, form)


def ends_in_words(row: Mapping[str, Any], form: str = ".2f") -> str:
    """The interval of an estimate in brackets, after a space; nothing where it is not known."""
    low, high = row.get("low"), row.get("high")
    return "" if None in (low, high) else f" ({_formed(low, form)} to {_formed(high, form)})"


def part_of(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The estimate that a row holds under `NAME_value`, `NAME_low` and `NAME_high`."""
    return {end: row[f"{name}_{end}"] for end in ("value", "low", "high")}


def _formed(value: Any, form: str) -> str:
    if not form.endswith("%"):
        return f"{value:{form}}"
    return percent(value, int(form[1:-1]) if form.startswith(".") else None)


P_VALUE = Column("p", form="{:.2g}", words={SMALLEST_P: f"< {SMALLEST_P:g}"})
