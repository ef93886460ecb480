"""Tables of a study, described as data: which rows to show, and how each column is written.

In: a finished study. Out: columns that the report and the terminal lay out, whatever study it is.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerleap.study.result import StudyResult

Row = dict[str, Any]
SMALLEST_P = 1e-300  # the smallest p-value that is told apart: floats end soon after
GOOD_OR_BAD = {True: "good", False: "bad", "yes": "good", "no": "bad", "partly": "partly"}


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


@dataclass(frozen=True)
class Column:
    """One column; `low` and `high` are keys of an interval shown in small print."""

    key: str
    title: str = ""  # the key when empty
    form: str = "{}"
    scale: float = 1.0  # 100 for percentages
    low: str = ""
    high: str = ""
    note: str = ""  # key of more small print
    colours: Mapping[Any, str] = field(default_factory=dict)  # by value: good, bad, partly, open
    words: Mapping[Any, str] = field(default_factory=dict)  # by value: what is written instead


def estimate(key: str, title: str = "", form: str = "{:.2f}", scale: float = 1.0) -> Column:
    """A column of values with their 95 % intervals, under the keys `low` and `high`."""
    return Column(key, title, form, scale, low="low", high="high")


P_VALUE = Column("p", form="{:.2g}", words={SMALLEST_P: f"< {SMALLEST_P:g}"})


@dataclass(frozen=True)
class Table:
    """One table of a section.

    With `across`, rows that agree in all `columns` become one row, and `cells` are repeated for
    every value of the key `across`: layers down, measures across.
    """

    key: str
    caption: str
    rows: Callable[["StudyResult"], Iterable[Row]]
    columns: tuple[Column, ...]
    across: str = ""
    cells: tuple[Column, ...] = ()
    forms: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # by value of `across`
    terminal: bool = False  # also printed by the command
    dense: bool = False
