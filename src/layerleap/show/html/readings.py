"""`Readings` as HTML: one grid per lens, a row per layer and a column per position."""

import html
from pathlib import Path

from layerleap.lens.readings import Readings, Track
from layerleap.maps.kinds import lens_title
from layerleap.show.html.page import notes_html, styled, visible, write_page

LEGEND = (
    '<p class="legend">Top token by layer: darker means more probable, framed where it is already '
    "the model's answer.</p>"
)


def readings_html(readings: Readings, *, linked: bool = True) -> str:
    """A grid per lens, the last layer on top; a link to the model's debugger, if it runs."""
    grids = "".join(_grid(readings, name, track) for name, track in readings.tracks.items())
    link = _link(readings) if linked else ""
    notes = notes_html(readings.notes)
    return styled("readings", f'{LEGEND}{notes}{link}<div class="grids">{grids}</div>')


def _link(readings: Readings) -> str:
    from layerleap.show.web.session import running

    session = running(getattr(readings.decode, "__self__", None))
    if session is None:
        return ""
    url = html.escape(session.link(readings.tokens), quote=True)
    return f'<p class="legend"><a href="{url}" target="_blank">Open in the debugger</a></p>'


def write_readings(readings: Readings, model: str, text: str, path: Path) -> Path:
    """Write readings as a standalone page and return its path."""
    return write_page(
        readings_html(readings, linked=False),
        path,
        kicker="readings",
        title=("What", model, "is about to say"),
        facts=(f"{readings.n_layers} layers", f"{len(readings.positions)} positions"),
        text=text,
        heading="Layer by layer",
        lead="One column per token of the text: what each layer would predict next. Hover over a "
        "cell to see its top tokens.",
    )


def _grid(readings: Readings, name: str, track: Track) -> str:
    head = "".join(f"<th>{visible(readings.tokens[p])}</th>" for p in readings.positions)
    body = "".join(_row(readings, track, layer) for layer in range(readings.n_layers, -1, -1))
    width = 4.5 + 10 * len(readings.positions)  # given, so that all grids have the same columns
    return (
        f'<div><table style="width:{width}em"><caption>{html.escape(lens_title(name))}</caption>'
        f"<thead><tr><th>layer</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(readings: Readings, track: Track, layer: int) -> str:
    cells = []
    for place in range(len(readings.positions)):
        top = [
            (readings.decode(int(token)), float(prob))
            for token, prob in zip(track.ids[layer, place], track.probs[layer, place], strict=True)
        ]
        listed = html.escape(", ".join(f"{token!r} {prob:.2f}" for token, prob in top), quote=True)
        agrees = " class=agrees" if bool(track.agrees[layer, place]) else ""
        background = f"rgba(42,120,214,{0.05 + 0.75 * top[0][1]:.2f})"
        cells.append(
            f'<td{agrees} style="background:{background}" title="{listed}">'
            f"{visible(top[0][0])}</td>"
        )
    return f"<tr><th>{layer}</th>{''.join(cells)}</tr>"
