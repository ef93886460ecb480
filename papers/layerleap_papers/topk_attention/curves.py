"""How curves over k are written, drawn and judged: for attention, for FFNs and for budgets.

In: tables with one row per k and measure. Out: words, points of figures, and the row that a claim
is about.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from layerleap import StudyResult
from layerleap.study import Row, percent

# Names of the measures as panels of figures.
PANELS = {
    "kl": "KL to the whole model, nats",
    "agreement": "agreement with the whole model",
    "loss": "growth of the loss, nats",
}
SAME_LOSS = 0.02  # nats: a loss that grows by less counts as nearly the same
SAME_TOP = 0.95  # agreement above which outputs count as nearly the same
EIGHTH = 1 / 8


def kept_share(seen: Tensor, k: int) -> float:
    """The share of its visible keys that a row keeps, as a mean over rows that see so many."""
    return float((seen.double().clamp_max(k) / seen).mean())


def nats(row: Mapping[str, Any] | None) -> str:
    """An estimate in nats with its interval."""
    return interval(row, "{:.3f}", "nats")


def interval(row: Mapping[str, Any] | None, form: str = "{:.2f}", unit: str = "") -> str:
    """A value with its interval, in brackets."""
    if row is None or row["value"] is None:
        return "unknown"
    text = form.format(row["value"]) + (f" {unit}" if unit else "")
    if row["low"] is None or row["high"] is None:
        return text
    return f"{text} ({form.format(row['low'])} to {form.format(row['high'])})"


def shares(row: Mapping[str, Any] | None) -> str:
    """A share with its interval, in percent."""
    if row is None or row["value"] is None:
        return "unknown"
    if row["low"] is None or row["high"] is None:
        return percent(row["value"])
    return f"{percent(row['value'])} ({percent(row['low'])} to {percent(row['high'])})"


def points(rows: Iterable[Row], x: str, line: str = "") -> Iterator[Row]:
    """Points of a figure with one panel per measure."""
    for row in rows:
        if row["measure"] in PANELS:
            point = {**row, "x": row[x], "y": row["value"], "panel": PANELS[row["measure"]]}
            yield {**point, "line": row.get("line", line)}


def measure_columns(result: StudyResult, table: str) -> Iterator[Row]:
    """Rows of a table with one column per measure."""
    for row in result.rows(table):
        yield {**row, "column": PANELS[row["measure"]]}


def nearest(result: StudyResult, table: str, key: str, wanted: float, **where: Any) -> float | None:
    """The value of `key` in a table that is nearest to `wanted`; the lower of two.

    None if all are more than twice, or less than half as much.
    """
    known = sorted({row[key] for row in result.rows(table, **where)})
    known = [value for value in known if wanted / 2 <= value <= 2 * wanted]
    return min(known, key=lambda value: abs(value - wanted), default=None)
