"""Cells of tables: values as text, for a page or a terminal, that only have to be laid out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layerleap.results.columns import Column, Row, Table

DASH, MINUS = "\u2013", "\u2212"
RGB = tuple[int, int, int]


@dataclass(frozen=True)
class Part:
    """A token or a word inside a cell."""

    text: str
    strong: bool = False
    title: str = ""  # what a page shows on hovering
    small: str = ""


@dataclass(frozen=True)
class Cell:
    """What is read, the small print, what it is sorted by, and how it looks."""

    text: str
    small: str = ""
    sort: float | None = None
    verdict: str = ""  # the class of a coloured word: good, bad, partly or open
    parts: tuple[Part, ...] = ()  # words with looks of their own, shown in place of the text
    strong: bool = False
    framed: bool = False  # underlined in a terminal
    colour: RGB | None = None  # of the background
    title: str = ""  # what a page shows on hovering
    bar: float | None = None  # a share, drawn behind or beside the value


@dataclass(frozen=True)
class Grid:
    """A table that only has to be laid out."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    legend: str = ""
    dense: bool = False
    one_line: bool = False  # rows take one line of a terminal: long texts are cut
    folded: str = ""  # on a page, it is opened by clicking on this title


def grid_of(table: Table, result: Any, *, wide: bool = True) -> Grid:
    """The cells of a table; no rows if the result has nothing for it."""
    rows = list(table.rows(result))
    shown = [_in_room(column, wide) for column in table.columns if wide or column.wide != "column"]
    heads = [column.title or column.key for column in shown]
    look = {"caption": table.caption, "legend": table.legend, "dense": table.dense}
    if table.across:
        more, lines = _across(table, rows, shown)
        return Grid(heads + more, lines, **look)  # type: ignore[arg-type]
    best = {column.key: _best(table, rows, column) for column in shown if column.best}
    lines = [
        [cell(row, column, best.get(column.key, {}).get(row.get(table.within))) for column in shown]
        for row in rows
    ]
    for number in (number for number, column in enumerate(shown) if column.bar):
        most = max((line[number].sort or 0.0 for line in lines), default=0.0)
        for line in lines if most else ():
            line[number] = replace(line[number], bar=(line[number].sort or 0.0) / most)
    return Grid(heads, lines, **look)  # type: ignore[arg-type]


def _in_room(column: Column, wide: bool) -> Column:
    return column if wide or column.wide != "interval" else replace(column, low="", high="")


def _across(
    table: Table, rows: Sequence[Row], shown: Sequence[Column]
) -> tuple[list[str], list[list[Cell]]]:
    """The repeated heads, and one line per group of rows that agree in all columns."""
    values = list(dict.fromkeys(_value_across(row, table) for row in rows))
    groups: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows:
        key = tuple(row.get(column.key) for column in table.columns)
        groups.setdefault(key, {})[_value_across(row, table)] = row
    columns = {value: [_formed(c, table, value) for c in table.cells] for value in values}
    lines = []
    for group in groups.values():
        first = next(iter(group.values()))
        line = [cell(first, column) for column in shown]
        line += [cell(group.get(value, {}), c) for value in values for c in columns[value]]
        lines.append(line)
    return [f"{c.title} {value}".strip() for value in values for c in columns[value]], lines


def _value_across(row: Row, table: Table) -> Any:
    return table.across.format_map(row) if "{" in table.across else row[table.across]


def _best(table: Table, rows: Sequence[Row], column: Column) -> dict[Any, float]:
    """By value of `within`, the best value where rows differ."""
    values: dict[Any, set[float]] = {}
    for row in rows:
        if row.get(column.key) is not None:
            values.setdefault(row.get(table.within), set()).add(row[column.key])
    choose = max if column.best == "max" else min
    return {key: choose(contest) for key, contest in values.items() if len(contest) > 1}


def _formed(column: Column, table: Table, value: Any) -> Column:
    """The column as this value of `across` is written: shares as percentages, nats as they are."""
    if value not in table.forms:
        return column
    form, scale = table.forms[value]
    return replace(column, form=form, scale=scale)


def cell(row: Row, column: Column, best: float | None = None) -> Cell:
    """One value in its column's form; a dash where it is not known."""
    value, note = row.get(column.key), str(row.get(column.note) or "") if column.note else ""
    verdict = column.colours.get(value, "") if _is_hashable(value) else ""
    if _is_hashable(value) and value in column.words:
        return Cell(column.words[value], note, verdict=verdict)
    if value is None:
        return Cell(DASH, note, verdict=verdict)
    if _are_tokens(value):
        return tokens_cell(value, {token["id"] for token in row.get(column.strong) or ()})
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = " to ".join(map(str, value)) if isinstance(value, list) else str(value)
        return Cell(text if text else DASH, note, verdict=verdict)
    text = _number(value, column)
    low, high = row.get(column.low) if column.low else None, row.get(column.high)
    interval = ""
    if low is not None and high is not None:
        interval = f"{_number(low, column)} to {_number(high, column)}"
    small = "; ".join(part for part in (interval, note) if part)
    return Cell(text, small, float(value), verdict, strong=best is not None and value == best)


def tokens_cell(tokens: Iterable[Any], strong: Iterable[int] = ()) -> Cell:
    """Labels of tokens, or of tokens with a score, separated by spaces."""
    parts = tuple(_part(token, set(strong)) for token in tokens)
    return Cell(" ".join(part.text for part in parts), parts=parts)


def _part(entry: Row, strong: set[int]) -> Part:
    token = entry["token"] if isinstance(entry.get("token"), dict) else entry
    about = f"id {token['id']}" if "score" not in entry else f"{entry['score']:+.3g}"
    return Part(token["label"], token["id"] in strong, about)


def labels(value: Any) -> Any:
    """A value of a data frame: tokens as their labels, separated by spaces."""
    if isinstance(value, list | tuple) and not value:
        return ""
    return tokens_cell(value).text if _are_tokens(value) else value


def _are_tokens(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)
    return is_list and ("label" in value[0] or "token" in value[0])


def _number(value: float, column: Column) -> str:
    form = "{:g}" if column.form == "{}" else column.form
    # A count stays a whole number: "{:,}" of 1000.0 is "1,000.0".
    scaled = value if column.scale == 1 else column.scale * value
    return form.format(scaled).replace("-", MINUS)


def _is_hashable(value: Any) -> bool:
    return not isinstance(value, list | dict | tuple)
