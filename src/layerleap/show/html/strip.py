"""`Strip` as HTML: a card per position, with its top tokens coloured by saturation layer."""

import html
from pathlib import Path
from typing import Any

from layerleap.lens.strip import Strip
from layerleap.maps.kinds import lens_title
from layerleap.show.html.colours import legend_layers, saturation_colour, text_colour
from layerleap.show.html.page import notes_html, styled, visible, write_page

Row = dict[str, Any]


def strip_html(strip: Strip) -> str:
    """A section per lens, a card per position: the token, and below it ranks 1 to k."""
    cards: dict[str, list[str]] = {name: [] for name in strip.tracks}
    for row in strip.rows():
        cards[row["map"]].append(_card(row, strip.n_layers))
    sections = (
        f"<section><h3>{html.escape(lens_title(name))}</h3>"
        f'<ol class="cards">{"".join(own)}</ol></section>'
        for name, own in cards.items()
    )
    return styled("strip", _legend(strip.n_layers) + notes_html(strip.notes) + "".join(sections))


def write_strip(strip: Strip, model: str, text: str, path: Path) -> Path:
    """Write a strip as a standalone page and return its path."""
    return write_page(
        strip_html(strip),
        path,
        kicker="saturation layers",
        title=("Where", model, "makes up its mind"),
        facts=(
            f"{strip.n_layers} layers",
            f"ranks 1 to {strip.k}",
            f"{len(strip.positions)} positions",
        ),
        text=text,
        heading="From which layer on each token keeps its rank",
        lead=f"Below each token of the text are the {strip.k} tokens that the model finds most "
        "likely to come next, best first. The number is the layer from which that token has this "
        f"rank and keeps it: layer 0 is the input, layer {strip.n_layers} the finished prediction. "
        "Darker means decided earlier.",
    )


def _card(row: Row, n_layers: int) -> str:
    ranks = "".join(_cell(rank, n_layers) for rank in row["ranks"])
    token = visible(row["token"])
    return f'<li><b title="position {row["position"]}">{token}</b><ol>{ranks}</ol></li>'


def _cell(rank: Row, n_layers: int) -> str:
    since = f"from layer {rank['layer']} on" if rank["saturates"] else "only at the last layer"
    title = html.escape(f"rank {rank['rank']}: {rank['token']!r} {since}", quote=True)
    is_next = " class=next" if rank["is_next"] else ""
    return (
        f'<li{is_next} style="{_style(rank["layer"], n_layers)}" title="{title}">'
        f"<span>{visible(rank['token'])}</span> <i>{rank['layer']}</i></li>"
    )


def _style(layer: int, n_layers: int) -> str:
    colour = saturation_colour(layer, n_layers)
    if colour is None:
        return "background:transparent"
    return "background:rgb({},{},{});color:{}".format(*colour, text_colour(colour))


def _legend(n_layers: int) -> str:
    steps = "".join(
        f'<i style="{_style(layer, n_layers)}">{layer}</i>' for layer in legend_layers(n_layers)
    )
    return (
        f'<p class="legend">Keeps its rank from layer {steps} on; no colour: only the last layer, '
        f"{n_layers}, put it there; framed: the token that actually comes next.</p>"
    )
