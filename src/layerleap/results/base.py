"""Result: what every result can do once it says which rows it has and what its columns are."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from layerleap.errors import check_choice
from layerleap.extras import report_library
from layerleap.results.cells import Grid, grid_of, labels
from layerleap.results.columns import Row, Table
from layerleap.results.plain import plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

WIDE = 130  # columns of a terminal from which a table shows everything


class Result:
    """Rows with columns, shown as JSON, a data frame, a terminal table or HTML.

    A class lists its `TABLES`; the first is the one that matters. It may add `facts`, `notes`, a
    `short` form, a `headline` and a `legend`. What limits it is part of every view. Where its
    picture is more than tables, it has a template of its own and prepares values in `picture`.
    """

    TABLES: ClassVar[tuple[Table, ...]] = ()
    FACTS: ClassVar[tuple[str, ...]] = ()  # attributes that its JSON holds besides tables
    LEGEND: ClassVar[str] = ""  # how to read it
    TEMPLATE: ClassVar[str] = "result"
    KIND: ClassVar[str] = "result"  # its class in the style sheet

    if TYPE_CHECKING:

        @property
        def notes(self) -> Sequence[str]:
            """What limits it, a sentence each."""
    else:
        notes = ()

    def facts(self) -> Row:
        """What its JSON holds besides tables and notes."""
        return {key: plain(getattr(self, key)) for key in self.FACTS}

    def short(self) -> str:
        """What it is, in one line."""
        return f"{type(self).__name__}({len(self.rows())} rows)"

    def headline(self) -> str:
        """One line above everything."""
        return self.short()

    def legend(self) -> str:
        """How to read it, in one line."""
        return self.LEGEND

    def rows(self) -> list[Row]:
        """The rows of the first table, as plain JSON types."""
        return list(self.TABLES[0].rows(self))

    def to_dict(self) -> Row:
        """Plain JSON types: what it is about, the rows of each table, and what limits it."""
        tables = {table.key: list(table.rows(self)) for table in self.TABLES}
        return {**self.facts(), **tables, "notes": list(self.notes)}

    def to_pandas(self, table: str | None = None) -> Any:
        """A data frame of one table, by its key; of the first one by default."""
        by_key = {each_table.key: each_table for each_table in self.TABLES}
        key = self.TABLES[0].key if table is None else table
        check_choice(key, by_key, "table")
        chosen = by_key[key]
        rows = list((chosen.lines or chosen.rows)(self))
        keys = chosen.keys or [column.key for column in chosen.columns]
        columns = None if rows else list(keys)
        lines = [{key: labels(value) for key, value in row.items()} for row in rows]
        return report_library("pandas").DataFrame(lines, columns=columns)

    def grids(self, width: int | None = None) -> Iterable[Grid]:
        """The tables to show: on a page (None), or in a terminal of some columns."""
        wide = width is None or width >= WIDE
        return [grid_of(table, self, wide=wide) for table in self.TABLES if table.columns]

    def link(self) -> str | None:
        """Where a notebook can show more of it."""
        return None

    def picture(self) -> Row:
        """Values that the template needs besides headline, legend, notes and tables."""
        return {}

    def __repr__(self) -> str:
        return "\n".join([self.short(), *(f"  note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        from layerleap.results.terminal import text_of

        return text_of(self)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from layerleap.results.terminal import renderables

        yield from renderables(self, options.max_width)

    def _repr_html_(self) -> str:
        from layerleap.results.page import result_html

        return result_html(self)
