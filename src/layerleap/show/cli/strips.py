"""A strip of saturation layers for the terminal.

In: a `Strip`. Out: a rich renderable.
"""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from layerleap.read.strip import Strip
from layerleap.show.cli.tables import new_table, visible
from layerleap.show.html.colours import legend_layers, saturation_colour, text_colour
from layerleap.show.html.page import lens_title

Row = dict[str, Any]


def strip_table(strip: Strip) -> RenderableType:
    """A line per position: its token, then ranks 1 to k, each with its layer and in its colour."""
    rows = list(strip.rows())
    tables = [
        _table(strip, lens_title(name), [row for row in rows if row["map"] == name])
        for name in strip.tracks
    ]
    return Group(*tables, _legend(strip))


def _table(strip: Strip, title: str, rows: Sequence[Row]) -> Table:
    table = new_table(Text(title))
    table.add_column("token", no_wrap=True, overflow="ellipsis", ratio=3)
    for rank in range(1, strip.k + 1):
        table.add_column(f"rank {rank}", no_wrap=True, overflow="ellipsis", ratio=3)
    for row in rows:
        cells = [_cell(rank, strip.n_layers) for rank in row["ranks"]]
        table.add_row(Text(visible(row["token"]), style="bold"), *cells)
    return table


def _cell(rank: Row, n_layers: int) -> RenderableType:
    style = _style(rank["layer"], n_layers)
    # The layer comes first: it is the point of the strip, and a narrow column cuts the end off.
    text = Text(f"{rank['layer']:>2} ", style=style, no_wrap=True, overflow="ellipsis")
    text.append(visible(rank["token"]), style="bold underline" if rank["is_next"] else "")
    return Padding(text, (0, 0), style=style)  # fills the cell, so that cells form a strip


def _style(layer: int, n_layers: int) -> str:
    colour = saturation_colour(layer, n_layers)
    if colour is None:
        return "dim"
    red, green, blue = colour
    return f"{text_colour(colour)} on #{red:02x}{green:02x}{blue:02x}"


def _legend(strip: Strip) -> Text:
    legend = Text().append("keeps its rank from layer ", style="dim")
    for layer in legend_layers(strip.n_layers):
        legend.append(f" {layer} ", style=_style(layer, strip.n_layers))
    return legend.append(
        f" on; no colour: only the last layer, {strip.n_layers}, put it there; "
        "underlined: the token that actually comes next",
        style="dim",
    )
