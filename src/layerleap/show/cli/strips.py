"""A strip of saturation layers in the terminal, and as a page of its own.

In: a `Strip`. Out: rich renderables, or one self-contained HTML file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from layerleap.read.readings import TITLES
from layerleap.read.strip import Strip, ink, marks, shade
from layerleap.show.cli.tables import new_table, visible
from layerleap.show.report.sheet import write_sheet

Row = dict[str, Any]


def strip_table(strip: Strip) -> RenderableType:
    """A line per position: its token, then ranks 1 to k, each with its layer and in its colour."""
    rows = list(strip.rows())
    tables = [
        _table(strip, TITLES.get(name, name), [row for row in rows if row["map"] == name])
        for name in strip.tracks
    ]
    return Group(*tables, _legend(strip))


def _table(strip: Strip, title: str, rows: Sequence[Row]) -> Table:
    table = new_table(Text(title))
    table.add_column("token", no_wrap=True, overflow="ellipsis", ratio=3)
    for rank in range(1, strip.k + 1):
        table.add_column(f"rank {rank}", no_wrap=True, overflow="ellipsis", ratio=3)
    for row in rows:
        cells = [_cell(one, strip.n_layers) for one in row["ranks"]]
        table.add_row(Text(visible(row["token"]), style="bold"), *cells)
    return table


def _cell(one: Row, n_layers: int) -> RenderableType:
    style = _style(one["layer"], n_layers)
    # The number first: it is what the strip is about, and a narrow column cuts the end off.
    text = Text(f"{one['layer']:>2} ", style=style, no_wrap=True, overflow="ellipsis")
    text.append(visible(one["token"]), style="bold underline" if one["right"] else "")
    return Padding(text, (0, 0), style=style)  # fills the cell, so that cells make a strip


def _style(layer: int, n_layers: int) -> str:
    colours = shade(layer, n_layers)
    if colours is None:
        return "dim"
    red, green, blue = colours
    return f"{ink(colours)} on #{red:02x}{green:02x}{blue:02x}"


def _legend(strip: Strip) -> Text:
    legend = Text().append("settled for good from layer ", style="dim")
    for layer in marks(strip.n_layers):
        legend.append(f" {layer} ", style=_style(layer, strip.n_layers))
    return legend.append(
        f" on; no colour: only the last layer, {strip.n_layers}, put it there; "
        "underlined: the token that does come next",
        style="dim",
    )


def write_strip(strip: Strip, model: str, text: str, path: Path) -> Path:
    """Write a strip as one self-contained page; returns its path."""
    return write_sheet(
        strip._repr_html_(), path, kicker="saturation layers",
        title=("Where", model, "makes up its mind"),
        facts=(
            f"{strip.n_layers} layers", f"ranks 1 to {strip.k}", f"{len(strip.positions)} positions"
        ),
        text=text, heading="From which layer on each token stands where it ends",
        lead=f"Under each token of the text are the {strip.k} tokens that the model holds most "
        "likely there, best first. The number is the layer from which that token stood at exactly "
        f"that rank and stayed: layer 0 is the input, layer {strip.n_layers} the finished answer. "
        "The darker, the earlier it was decided.",
    )  # fmt: skip
