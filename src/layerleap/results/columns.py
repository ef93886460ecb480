"""Tables described as data: which rows to show, and how each column is written.

In: a result. Out: columns that pages and terminals lay out, whatever result it is.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Row = dict[str, Any]
Wide = Literal["", "interval", "column"]
GOOD_OR_BAD = {True: "good", False: "bad", "yes": "good", "no": "bad", "partly": "partly"}


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
    best: Literal["", "max", "min"] = ""  # which value is bold, among rows alike in Table.within
    wide: Wide = ""  # what is left out in narrow terminals
    bar: bool = False  # drawn as a share of the largest value
    strong: str = ""  # key of the tokens that are bold in this column of tokens


def estimate(key: str, title: str = "", form: str = "{:.2f}", scale: float = 1.0) -> Column:
    """A column of values with their 95 % intervals, under the keys `low` and `high`."""
    return Column(key, title, form, scale, low="low", high="high")


@dataclass(frozen=True)
class Table:
    """One table of a result.

    With `across`, rows that agree in all `columns` become one row, and `cells` are repeated for
    every value of the key `across`, or of that text with fields: layers down, measures across.
    """

    key: str
    caption: str
    rows: Callable[[Any], Iterable[Row]]
    columns: tuple[Column, ...] = ()
    across: str = ""
    cells: tuple[Column, ...] = ()
    forms: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # by value of `across`
    terminal: bool = False  # also printed by the command of a study
    dense: bool = False
    within: str = ""  # key that rows share among which the best value is bold
    legend: str = ""  # how to read it, in one line
    lines: Callable[[Any], Iterable[Row]] | None = None  # of a data frame, if they are not `rows`
    keys: tuple[str, ...] = ()  # of a data frame without lines, if they are not those of `columns`
