"""Cells of tables: values as text, for a page or a terminal, that only have to be laid out."""

from dataclasses import dataclass, replace
from typing import Any

from layerleap.study.result import StudyResult
from layerleap.study.tables import GOOD_OR_BAD, Column, Row, Table

DASH, MINUS = "\u2013", "\u2212"


@dataclass(frozen=True)
class Cell:
    """What is read, the small print, what it is sorted by, and the class of a coloured word."""

    text: str
    small: str = ""
    sort: float | None = None
    verdict: str = ""  # good, bad, partly or open


Grid = tuple[list[str], list[list[Cell]]]


def cells_of(table: Table, result: StudyResult) -> Grid:
    """Heads and rows of a table; no rows if the study has nothing for it."""
    rows = list(table.rows(result))
    head = [column.title or column.key for column in table.columns]
    if not table.across:
        return head, [[cell(row, column) for column in table.columns] for row in rows]
    values = list(dict.fromkeys(_across(row, table) for row in rows))
    groups: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for row in rows:
        key = tuple(row.get(column.key) for column in table.columns)
        groups.setdefault(key, {})[_across(row, table)] = row
    columns = {value: [_formed(c, table, value) for c in table.cells] for value in values}
    head += [f"{c.title} {value}".strip() for value in values for c in columns[value]]
    lines = []
    for group in groups.values():
        first = next(iter(group.values()))
        line = [cell(first, column) for column in table.columns]
        line += [cell(group.get(value, {}), c) for value in values for c in columns[value]]
        lines.append(line)
    return head, lines


def _across(row: Row, table: Table) -> Any:
    return table.across.format_map(row) if "{" in table.across else row[table.across]


def _formed(column: Column, table: Table, value: Any) -> Column:
    """The column as this value of `across` is written: shares as percentages, nats as they are."""
    if value not in table.forms:
        return column
    form, scale = table.forms[value]
    return replace(column, form=form, scale=scale)


def cell(row: Row, column: Column) -> Cell:
    """One value in its column's form; a dash where it is not known."""
    value, note = row.get(column.key), str(row.get(column.note) or "") if column.note else ""
    verdict = column.colours.get(value, "") if _is_hashable(value) else ""
    if _is_hashable(value) and value in column.words:
        return Cell(column.words[value], note, verdict=verdict)
    if value is None:
        return Cell(DASH, note, verdict=verdict)
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = " to ".join(map(str, value)) if isinstance(value, list) else str(value)
        return Cell(text if text else DASH, note, verdict=verdict)
    text = _number(value, column)
    ends = row.get(column.low) if column.low else None, row.get(column.high)
    small = ""
    if ends[0] is not None and ends[1] is not None:
        small = f"{_number(ends[0], column)} to {_number(ends[1], column)}"
    return Cell(text, "; ".join(part for part in (small, note) if part), float(value), verdict)


def _number(value: float, column: Column) -> str:
    form = "{:g}" if column.form == "{}" else column.form
    return form.format(column.scale * value).replace("-", MINUS)


def _is_hashable(value: Any) -> bool:
    return not isinstance(value, list | dict)


CLAIMS = Table(
    "claims-table",
    "Claims, beside what this study measured",
    lambda r: [row for row in r.claims if row not in r.untested],
    (
        Column("claim", "the paper says"),
        Column("agrees", "holds here?", colours={**GOOD_OR_BAD, "cannot tell": "open"}),
        Column("seen", "measured here"),
        Column("why", "how decided"),
    ),
)
UNTESTED = Table(
    "untested-table",
    "Claims that this run could not test",
    lambda r: r.untested,
    (Column("claim", "the paper says"), Column("seen", "why it was not tested")),
)
DATA = Table(
    "data-table",
    "Data",
    lambda r: r.data,
    (
        Column("text"),
        Column("role", "used to"),
        *(Column(key, form="{:,.0f}") for key in ("documents", "texts", "rows", "tokens")),
        Column("seconds", form="{:,.1f}"),
        Column("fingerprint"),
    ),
)
