"""Rows of a study's tables, chosen and named by data: what figures and tables are made of.

In: the name of a table and values of its columns. Out: a `Pick`, which gives those rows of any
result; tables, figures and claims take it where they take a function.

    pick("scores", map=("mat", "id"), layer=KNOWN)      rows of mat, then of id, of single layers
    points("scores", x="layer", line="{map}", panel="Through {map}")    the same as points

A text with fields in braces, such as a line or panel, is filled in from each row.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
        words = {key: _of(value, result) for key, value in self.words.items()}
        every = [row for name in self.tables for row in result.rows(name)]
        return [self._named(row, words) for row in chosen(every, where)]

    def __add__(self, other: "Pick") -> Callable[["StudyResult"], list[Row]]:
        """Its rows, and those of another one after them."""
        return lambda result: [*self(result), *other(result)]

    def _named(self, row: Row, words: Mapping[str, Words]) -> Row:
        named = {key: names.get(row.get(key), row.get(key)) for key, names in words.items()}
        whole = {**row, **named}
        copied = {key: whole.get(other) for key, other in self.keys.items()}
        texts = {key: text.format_map(whole) for key, text in self.texts.items()}
        return {**whole, **copied, **texts}


def _of(value: Any, result: "StudyResult") -> Any:
    return value(result) if callable(value) else value


def chosen(rows: Iterable[Row], where: Mapping[str, Any]) -> list[Row]:
    """The rows whose columns have these values, in their order, or in that of several values."""
    matches = [row for row in rows if all(_is(row.get(key), value) for key, value in where.items())]
    for key, value in reversed(list(where.items())):
        if isinstance(value, Sequence | Mapping) and not isinstance(value, str):
            matches.sort(key=lambda row, key=key, order=list(value): order.index(row.get(key)))  # type: ignore[misc]
    return matches


def _is(content: Any, value: Any) -> bool:
    if value is KNOWN:
        return content is not None
    is_several = isinstance(value, Collection) and not isinstance(value, str)
    return bool(content in value if is_several else content == value)


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
