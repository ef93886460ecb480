"""The order of saturation as a table for the terminal, readable at 80 columns.

In: the plain-data result of a study of saturation. Out: a rich renderable, or None without data.
"""

from rich.console import Group, RenderableType
from rich.text import Text

from layerleap.show.cli.tables import new_table
from layerleap.show.figures.select import Row, Study, finite


def order_table(study: Study) -> RenderableType | None:
    """A line per lens and rank: where it settles, how often, and in which place."""
    found = study["order"]
    if not found:
        return None
    table = new_table(Text("where each rank of the prediction settles"))
    table.add_column("map", no_wrap=True)
    for title in ("rank", "mean layer if so", "never", "mean place", "in a random walk"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, one in found.items():
        places = {row["rank"]: row for row in one["places"] if not row["filtered"]}
        walks = {row["rank"]: row for row in one["walk_places"]}
        for row in one["histogram"]:
            rank = row["rank"]
            table.add_row(
                Text(name), Text(str(rank)), _layer(row["mean_layer"]),
                Text(f"{row['never']:.0%}"), _place(places.get(rank)), _place(walks.get(rank)),
            )  # fmt: skip
    one = next(iter(found.values()))
    said = f"{one['rows']:,} positions of {one['documents']:,} documents, {one['n_layers']} layers"
    note = f"{said}. Place 1 settles first; intervals are 95 %, over documents."
    return Group(table, Text(note, style="dim"))


def _layer(mean: float | None) -> Text:
    """Of those that settle."""
    return Text("-", style="dim") if mean is None else Text(f"{mean:.1f}")


def _place(row: Row | None) -> Text:
    value = None if row is None else finite(row["value"])
    if row is None or value is None:
        return Text("-", style="dim")
    text = Text(f"{value:.2f}")
    if row["low"] is not None and row["high"] is not None:
        text.append(f" {row['low']:.2f}-{row['high']:.2f}", style="dim")
    return text
