"""Results in a terminal, readable at 80 columns.

In: results and grids. Out: rich renderables; printing is the caller's.
Everything that comes from data is put in as `Text`, so that "[red]" in a name stays a name.
"""

import io
from collections.abc import Iterator

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from layerleap.results.base import Result
from layerleap.results.cells import Cell, Grid
from layerleap.results.colours import text_colour

COLOURS = {"good": "green", "bad": "bold red", "partly": "yellow", "open": "dim"}
BAR, LONGEST_BAR = "\u2501", 12
FEW = 4  # columns that leave room for bars
SHORT = 8  # letters of a text that is not cut


def text_of(result: Result, width: int = 80) -> str:
    """The result as plain text, at most `width` columns wide."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, force_terminal=False)
    console.print(result, soft_wrap=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def renderables(result: Result, width: int) -> Iterator[RenderableType]:
    """Headline, notes, tables and legend."""
    yield Text(result.headline())
    yield from (Text(f"note: {note}", style="yellow") for note in result.notes)
    for grid in result.grids(width):
        yield Group("", grid_table(grid))
    if legend := result.legend():
        yield Text(f"\n{legend}", style="dim")


def grid_table(grid: Grid) -> RenderableType:
    """A table with a rule under its head and no frame; its caption above, its legend below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, expand=grid.one_line)
    table.show_edge, table.show_header = False, any(grid.heads)
    heads = list(grid.heads)
    if grid.dense:  # heads of one word per line leave room for names
        table.padding = 0
        heads = [head.replace(" ", "\n").replace("\n%", " %") for head in heads]
    for number, head in enumerate(heads):
        _add_column(table, head, [row[number] for row in grid.rows], grid)
    for row in grid.rows:
        table.add_row(*(_cell(cell, grid) for cell in row))
    above = [Text(grid.caption, style="italic")] if grid.caption else []
    below = [Text(grid.legend, style="dim")] if grid.legend else []
    return Group(*above, table, *below) if grid.rows else Group(*above, Text("none", style="dim"))


def _add_column(table: Table, head: str, cells: list[Cell], grid: Grid) -> None:
    is_number = any(cell.sort is not None for cell in cells)
    is_long = any(len(cell.text) > SHORT for cell in cells)
    table.add_column(
        Text(head),
        justify="right" if is_number else "left",
        # Where there is no room, names are folded: only a row of one line is cut.
        overflow="ellipsis" if grid.one_line else "fold",
        no_wrap=grid.one_line,
        ratio=1 if grid.one_line and is_long and not is_number else None,
    )


def _cell(cell: Cell, grid: Grid) -> RenderableType:
    style = COLOURS.get(cell.verdict, "")
    if cell.colour is not None:
        style = f"{text_colour(cell.colour)} on #{bytes(cell.colour).hex()}"
    text = Text(cell.text if not cell.parts else "", style=style)
    for place, part in enumerate(cell.parts):
        text.append(" " if place else "").append(part.text, style="bold" if part.strong else "")
        text.append(f" {part.small} " if part.small else "", style="dim")
    if cell.strong:
        text.stylize("bold")
    if cell.framed:
        text.stylize("underline")
    if cell.small and not grid.dense:  # a dense table has no room for intervals
        text.append(f" {cell.small}", style="dim")
    if cell.bar is not None and len(grid.heads) <= FEW:
        text.append(f" {BAR * round(LONGEST_BAR * cell.bar)}".ljust(LONGEST_BAR + 1), style="blue")
    if grid.one_line:
        text.no_wrap, text.overflow = True, "ellipsis"
    # Padding fills the cell, so that neighbours form a strip.
    return text if cell.colour is None else Padding(text, (0, 0), style=style)
