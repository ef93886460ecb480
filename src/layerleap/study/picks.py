"""Rows of a study's tables, chosen and named by data: what figures and tables are made of.

In: the name of a table and values of its columns. Out: a `Pick`, which gives those rows of any
result; tables, figures and claims take it where they take a function.

    pick("scores", map=("mat", "id"), layer=KNOWN)      rows of mat, then of id, of single layers
    points("scores", x="layer", line="{map}", panel="Through {map}")    the same as points

A text with fields in braces, such as a line or panel, is filled in from each row.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerleap.study.result import StudyResult

Row = dict[str, Any]
Words = Mapping[Any, str]
KNOWN: Any = object()  # as the value of a column: any but None


@dataclass(frozen=True)
class Pick:
    """Some rows of a table, or of several, and how their values are called.

    A value of `where` is what a column must be. A set holds several; so does a tuple, list or dict,
    and rows are put in its order, by the first such column first. It may be a function of the
    result, and so may `words`: by column, what is written instead of a value.
    """

    tables: tuple[str, ...]
    where: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Words | Callable[["StudyResult"], Words]] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)  # new columns: copies of others
    texts: Mapping[str, str] = field(default_factory=dict)  # new columns: texts with fields

    def __call__(self, result: "StudyResult") -> list[Row]:
        """The rows of a result; none if it does not have the table."""
        where = {key: _of(value, result) for key, value in self.where.items()}
        found = [row for name in self.tables for row in result.rows(name) if _fits(row, where)]
        for key, value in reversed(where.items()):
            if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
                order = {each: place for place, each in enumerate(value)}
                places = [order[row.get(key)] for row in found]
                found = [found[n] for n in sorted(range(len(found)), key=places.__getitem__)]
        words = {key: _of(value, result) for key, value in self.words.items()}
        return [self._named(row, words) for row in found]

    def __add__(self, other: "Pick") -> Callable[["StudyResult"], list[Row]]:
        """Its rows, and those of another one after them."""
        return lambda result: [*self(result), *other(result)]

    def _named(self, row: Row, words: Mapping[str, Words]) -> Row:
        named = {key: own.get(row.get(key), row.get(key)) for key, own in words.items()}
        whole = {**row, **named}
        copied = {key: whole.get(other) for key, other in self.keys.items()}
        texts = {key: text.format_map(whole) for key, text in self.texts.items()}
        return {**whole, **copied, **texts}


def _of(value: Any, result: "StudyResult") -> Any:
    return value(result) if callable(value) else value


def _fits(row: Row, where: Mapping[str, Any]) -> bool:
    for key, value in where.items():
        own = row.get(key)
        if value is KNOWN:
            if own is None:
                return False
        elif isinstance(value, Collection) and not isinstance(value, str):
            if own not in value:
                return False
        elif own != value:
            return False
    return True


def pick(*tables: str, words: Mapping[str, Any] | None = None, **where: Any) -> Pick:
    """The rows of these tables whose columns have these values, with `words` for some values."""
    return Pick(tables, where, words or {})


def points(
    *tables: str,
    x: str = "layer",
    y: str = "value",
    line: str = "",
    panel: str = "",
    value: str = "value",
    note: str = "",
    words: Mapping[str, Any] | None = None,
    **where: Any,
) -> Pick:
    """The same rows as points of a figure.

    Args:
        tables: names of tables.
        x: the column across.
        y: the column up; its interval is in `low` and `high`, or, beside a column `lead_value`,
            in `lead_low` and `lead_high`.
        line: text with fields; rows with the same one are a line.
        panel: the same for panels.
        value: the column that colours a heat map.
        note: text with fields, written beside a dot.
        words: by column, what is written instead of a value.
        where: values of columns.
    """
    start = y.removesuffix("value") if y.endswith("value") else ""
    keys = {"x": x, "y": y, "value": value}
    keys |= {end: f"{start}{end}" for end in ("low", "high") if start}
    texts = {"line": line, "panel": panel, "note": note}
    texts = {key: text for key, text in texts.items() if text}
    return Pick(tables, where, words or {}, keys, texts)
