"""Draws the figures of any study: SVG text for a page, and the summary picture as PNG."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from layerleap.extras import report_library
from layerleap.maps.kinds import lens_title
from layerleap.show.figures import canvas
from layerleap.show.figures.axes import draw_marks, dress, grid_for, legend_above, zoom_in
from layerleap.show.figures.canvas import INK, PALETTE, SOFT
from layerleap.study.engine import Picture, Study
from layerleap.study.figures import LENSES, Figure, Line, Row, short
from layerleap.study.result import StudyResult

MANY = 60  # points; beyond that the markers of a line would touch
LETTERS = 11.5  # of a panel's title per inch, beside an inch for the labels of the y axis


def figure_rows(figure: Figure, result: StudyResult) -> list[Row]:
    """The rows that a figure draws: those whose values are known."""
    if figure.kind == "heatmap":
        return [row for row in figure.rows(result) if is_known(row["value"])]
    ranges = {name for name, line in figure.lines.items() if line.style == "range"}
    axes = {"x": figure.x, "y": figure.y}
    keys = [key for key, axis in axes.items() if axis.scale != "category"]

    def has(row: Row, key: str) -> bool:
        is_range = key == _value_key(figure) and row.get("line") in ranges
        if is_known(row[key]):
            return axes[key].scale != "log" or row[key] > 0
        return is_range and is_known(row.get("low"))

    return [row for row in figure.rows(result) if all(has(row, key) for key in keys)]


def draw(figure: Figure, result: StudyResult) -> str | None:
    """The figure as SVG text; None if the study has nothing for it."""
    rows = figure_rows(figure, result)
    if not rows:
        return None
    by_panel = _panels(rows)
    columns = min(len(by_panel), figure.columns)
    lines = -(-len(by_panel) // columns)
    width, height = figure.size
    if figure.y.scale == "category":
        beside = len({row.get("line") for row in rows}) if figure.dodge else 1
        step = max(0.42, 0.21 * beside)  # points side by side, each with room for its note
        height = 1.4 + step * max(len(_categories(panel, "y")) for panel in by_panel.values())
    with canvas.drawing():
        layout = "compressed" if figure.kind == "heatmap" else "constrained"
        sheet = canvas.new_figure(width * columns + 0.5, height * lines + 0.2, layout)
        share_y = figure.share_y and not figure.zoom and figure.y.scale != "category"
        flat = list(sheet.subplots(lines, columns, squeeze=False, sharey=share_y).ravel())
        for axes in flat[len(by_panel) :]:
            axes.set_visible(False)
        for number, (axes, (name, panel)) in enumerate(zip(flat, by_panel.items(), strict=False)):
            mesh = draw_panel(axes, figure, result, name, panel, rows)
            if number % columns:
                axes.set_ylabel("")
            if number + columns < len(by_panel):  # the panel below says the same
                axes.set_xlabel("")
        if figure.kind == "heatmap" and not figure.cell_form:
            colour_bar(sheet, mesh, flat[: len(by_panel)], figure)
        legend_above(sheet, flat[: len(by_panel)])
        return canvas.to_svg(sheet, figure.key, in_words(figure, by_panel))


def draw_panel(
    axes: Any, figure: Figure, result: StudyResult, name: str, panel: list[Row], rows: list[Row]
) -> Any:
    """Draw one panel; returns what a colour bar needs, for heat maps."""
    n_layers = result.model["n_layers"]
    axes.set_title(textwrap.fill(name, round(LETTERS * (figure.size[0] - 1))))
    looks = _looks(figure, rows)
    if figure.kind == "heatmap":
        mesh = _heatmap(axes, figure, panel)
        _corner_note(axes, panel, (0.97, 0.05), "bottom")
        axes.set(xlabel=figure.x.label, ylabel=figure.y.label)
        return mesh
    draw_kind = {"lines": _lines, "dots": _dots, "bars": _bars}[figure.kind]
    draw_kind(axes, figure, panel, looks)
    for which, axis in (("x", figure.x), ("y", figure.y)):
        dress(axes, which, axis, n_layers, _categories(panel, which))
    if figure.kind == "bars":
        bars = rows if figure.share_y else panel
        plain = [row["y"] for row in bars if not row.get("muted")]
        if figure.y.low is None and (figure.y.scale == "number" or len(plain) < len(bars)):
            axes.set_ylim(0, 1.25 * max([*plain, 1e-9]))
        if figure.x.scale == "layer":
            axes.set_xlim(-0.6, n_layers + 0.6)
    if name in figure.zoom:
        points = [(row["x"], row["y"]) for row in panel]
        zoom_in(axes, *figure.zoom[name], points)
    grid_for(axes, figure.x, figure.y)
    draw_marks(axes, [m for m in figure.marks(result) if m.panel in (None, name)])
    return None


def _panels(rows: Iterable[Row]) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.get("panel", ""), []).append(row)
    return panels


def _categories(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _value_key(figure: Figure) -> str:
    return "x" if figure.y.scale == "category" else "y"


def _looks(figure: Figure, rows: Sequence[Row]) -> dict[str, Line]:
    """How each line looks: as the figure says, as lenses do everywhere, or the next free colour."""
    names = dict.fromkeys(row.get("line", "") for row in rows)
    ordered = [n for n in dict.fromkeys((*figure.lines, *names)) if n in names]
    looks = {**LENSES, **figure.lines}
    # Lines that only the data know may bring their colour along.
    coloured = [row for row in rows if row.get("colour") and figure.kind == "lines"]
    colours = {row.get("line", ""): row["colour"] for row in coloured}
    taken = {line.colour for line in figure.lines.values()}
    free = cycle(colour for colour in canvas.FREE if colour not in taken)
    for name in ordered:
        line = looks.get(name, Line())
        colour = line.colour or colours.get(name) or ("blue" if len(ordered) == 1 else next(free))
        looks[name] = replace(line, label=line.label or lens_title(name), colour=colour)
    return {name: looks[name] for name in ordered}


def _of(panel: Iterable[Row], name: str) -> list[Row]:
    return [row for row in panel if row.get("line", "") == name]


def _label(axes: Any, line: Line) -> str | None:
    """The label, unless this panel has it already."""
    return None if line.label in axes.get_legend_handles_labels()[1] else line.label or None


def _lines(axes: Any, figure: Figure, panel: list[Row], looks: dict[str, Line]) -> None:
    for name, line in looks.items():
        rows = sorted(_of(panel, name), key=lambda row: row["x"])
        if not rows:
            continue
        colour = PALETTE[line.colour]
        x, y = [row["x"] for row in rows], [row["y"] for row in rows]
        style: dict[str, Any]
        if line.style == "star":
            style = {"markersize": 13, "markeredgecolor": INK, "markeredgewidth": 0.7, "zorder": 5}
            # Over the edge of the panel: what always agrees lies at the very top.
            axes.plot(x, y, "*", color=colour, label=line.label, clip_on=False, **style)
            continue
        few = len(rows) <= MANY and line.marker
        style = {"linewidth": line.width, "label": line.label, "markersize": 3.6, "zorder": 3}
        style["marker"] = line.marker if few or line.style == "points" else None
        style["linestyle"] = {"dashed": canvas.DASHED, "points": ""}.get(line.style, "-")
        axes.plot(x, y, color=colour, clip_on=name in figure.lines and bool(figure.zoom), **style)
        _intervals(axes, rows, line, colour)


def _intervals(axes: Any, rows: list[Row], line: Line, colour: str) -> None:
    """A band along a line, or a bar through each point, where the interval is known."""
    known = [row for row in rows if _has_interval(row)]
    if not known or not line.band:
        return
    x = [row["x"] for row in known]
    low, high = [row["low"] for row in known], [row["high"] for row in known]
    if line.style == "points":
        axes.vlines(x, low, high, color=colour, linewidth=0.9, alpha=0.6)
    else:
        axes.fill_between(x, low, high, color=colour, alpha=line.band, linewidth=0)


def _has_interval(row: Row) -> bool:
    return is_known(row.get("low")) and is_known(row.get("high"))


def _dots(axes: Any, figure: Figure, panel: list[Row], looks: dict[str, Line]) -> None:
    """Points with intervals; the category runs along y, or along x."""
    across = figure.y.scale == "category"
    axis, key = (figure.y, "y") if across else (figure.x, "x")
    categories = _categories(panel, key)
    shown = [name for name in looks if _of(panel, name)]
    for name in shown:
        line = looks[name]
        step = min(0.3, 0.75 / len(shown)) if figure.dodge else 0.0
        shift = (shown.index(name) - (len(shown) - 1) / 2) * step
        thick = line.style == "range"
        style: dict[str, Any]
        for row in _of(panel, name):
            place = (categories.index(row[key]) if axis.scale == "category" else row[key]) + shift
            colour = PALETTE[row.get("colour") or line.colour]
            if _has_interval(row) and line.band:
                pair = [row["low"], row["high"]], [place] * 2
                style = {"zorder": 3, "linewidth": 1.6}
                if thick:
                    style = {"zorder": 2, "linewidth": 7, "label": _label(axes, line)}
                ends = pair if across else pair[::-1]
                axes.plot(*ends, color=colour, solid_capstyle="butt", **style)
            if not thick:
                spot = (row["x"], place) if across else (place, row["y"])
                style = {"markerfacecolor": "white" if row.get("hollow") else colour}
                style |= {"markersize": 6, "markeredgewidth": 1.4, "zorder": 4, "clip_on": False}
                axes.plot(
                    *spot, line.marker or "o", color=colour, label=_label(axes, line), **style
                )
            if row.get("note"):
                where = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8.5}
                axes.text(1.01, place, row["note"], color=SOFT, **where)


def _bars(axes: Any, figure: Figure, panel: list[Row], looks: dict[str, Line]) -> None:
    shown = [name for name in looks if _of(panel, name)]
    categories = _categories(panel, "x") if figure.x.scale == "category" else None
    width = 0.84 / max(len(shown), 1)
    for index, name in enumerate(shown):
        line, rows = looks[name], _of(panel, name)
        shift = (index - (len(shown) - 1) / 2) * width
        places = [(categories.index(r["x"]) if categories else r["x"]) + shift for r in rows]
        colours = ["#c9d1d9" if row.get("muted") else PALETTE[line.colour] for row in rows]
        axes.bar(places, [row["y"] for row in rows], width * 0.94, color=colours, zorder=2)
        # The legend shows the colour of the line, even if all of its bars are muted.
        axes.bar(places[:1], [0], width, color=PALETTE[line.colour], label=line.label or None)
        for place, row in zip(places, rows, strict=True):
            if _has_interval(row):
                axes.vlines(place, row["low"], row["high"], color=INK, linewidth=1.1, zorder=3)
    _corner_note(axes, panel, (0.985, 0.95), "top")


def _corner_note(axes: Any, panel: Iterable[Row], place: tuple[float, float], va: str) -> None:
    text = next((row["note"] for row in panel if row.get("note")), "")
    style = {"transform": axes.transAxes, "ha": "right", "va": va, "fontsize": 8.5, "color": SOFT}
    axes.text(*place, text, **style)


def _heatmap(axes: Any, figure: Figure, panel: list[Row]) -> Any:
    """One cell per row, coloured by its value; values outside the range get its end colours."""
    numpy, matplotlib = report_library("numpy"), report_library("matplotlib")
    xs, ys = (sorted({row[key] for row in panel}) for key in ("x", "y"))
    values = numpy.full((len(ys), len(xs)), numpy.nan)
    for row in panel:
        values[ys.index(row["y"]), xs.index(row["x"])] = row["value"]
    low, high = figure.value.low, figure.value.high
    whole = all(isinstance(v, int) for v in (*xs, *ys)) and not figure.cell_form
    extent = (xs[0] - 0.5, xs[-1] + 0.5, ys[0] - 0.5, ys[-1] + 0.5) if whole else None
    colours = matplotlib.colormaps["Blues" if figure.cell_form else "viridis"].resampled(128)
    origin = "lower" if whole else "upper"
    how: dict[str, Any] = {"origin": origin, "extent": extent, "interpolation": "none"}
    how |= {"cmap": colours, "vmin": low, "vmax": high, "aspect": "equal"}
    mesh = axes.imshow(numpy.ma.masked_invalid(values), **how)
    ticker = report_library("matplotlib.ticker")
    if whole:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(ticker.MaxNLocator(6, integer=True))
        return mesh
    axes.set_xticks(range(len(xs)), [str(x) for x in xs])
    axes.set_yticks(range(len(ys)), [str(y) for y in ys])
    middle = ((low or 0) + (1 if high is None else high)) / 2
    for (down, right), value in numpy.ndenumerate(values):
        if figure.cell_form and is_known(float(value)):
            colour = "white" if value > middle * 1.1 else INK
            text = figure.cell_form.format(value)
            axes.text(right, down, text, ha="center", va="center", color=colour)
    return mesh


def colour_bar(sheet: Any, mesh: Any, panels: Sequence[Any], figure: Figure) -> None:
    """The scale of a heat map, beside its panels."""
    bar = sheet.colorbar(mesh, ax=list(panels), shrink=0.82, pad=0.02, aspect=24)
    bar.set_label(figure.value.label)
    bar.outline.set_visible(False)


def in_words(figure: Figure, panels: dict[str, list[Row]]) -> str:
    """The figure for those who hear it: where each line starts and ends, or its range of values."""
    parts = []
    for panel, rows in panels.items():
        for name in dict.fromkeys(row.get("line", "") for row in rows):
            line, title = _of(rows, name), ", ".join(part for part in (panel, name) if part)
            if figure.kind == "lines":
                first, last = min(line, key=lambda r: r["x"]), max(line, key=lambda r: r["x"])
                words = f"{first['y']:.3g} at {first['x']:g} to {last['y']:.3g} at {last['x']:g}"
            else:
                key = "value" if figure.kind == "heatmap" else _value_key(figure)
                known = [row[key] for row in line if is_known(row[key])]
                words = f"{min(known):.3g} to {max(known):.3g}" if known else "intervals only"
            parts.append(f"{title}: {words}" if title else words)
    return f"{figure.title}. " + "; ".join(parts) + "."


def draw_picture(study: Study[Any], result: StudyResult) -> bytes | None:
    """The summary picture of a study as PNG: some of its figures under a computed title."""
    picture = study.picture
    if picture is None:
        return None
    figures = {f.key: f for section in study.sections for f in section.figures}
    shown = []
    for figure in (figures[key] for key in picture.figures):
        lines = picture.lines
        drawn = figure_rows(figure, result)
        rows = [row for row in drawn if not (lines and "line" in row) or row["line"] in lines]
        for name, panel in _panels(rows).items():
            if not picture.panels or name in picture.panels:
                shown.append((figure, name, panel, rows))
    if not shown:
        return None
    with canvas.drawing():
        sheet = canvas.new_figure(12, 5.2)
        widths = picture.widths[: len(shown)]
        [grid] = sheet.subplots(1, len(shown), width_ratios=widths, squeeze=False)
        sheet.get_layout_engine().set(rect=(0.012, 0.06, 0.976, 0.76), wspace=0.07)
        for axes, (figure, name, panel, rows) in zip(grid, shown, strict=True):
            mesh = draw_panel(axes, figure, result, name, panel, rows)
            axes.set_title(f"{figure.title}: {name}" if name else figure.title)
            if mesh is not None:
                colour_bar(sheet, mesh, [axes], figure)
            elif axes.get_legend_handles_labels()[1]:
                axes.legend(loc="upper left", fontsize=10)
        _arrow(grid[0], picture, result)
        title = picture.title(result)
        sheet.text(0.018, 0.965, title, fontsize=16.5, weight="bold", va="top", linespacing=1.25)
        text = result.settings.get("text")
        parts = [short(result.model["name"], 40), f"{result.model['n_layers']} layers"]
        parts += [f"read on {short(text, 40)}"] if text else []
        facts = f"{', '.join(parts)}; {sample_of(shown[0][0], shown[0][2])}"
        sheet.text(0.985, 0.015, facts, fontsize=8.5, color=SOFT, va="bottom", ha="right")
        return canvas.to_png(sheet)


def _arrow(axes: Any, picture: Picture, result: StudyResult) -> None:
    """An arrow from one x to an earlier one, with what it means written above."""
    arrow = picture.arrow(result)
    if arrow is None:
        return
    start, end, height, label = arrow
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (end, height), (start, height), arrowprops=style, zorder=4)
    place = {"ha": "right", "va": "bottom", "fontsize": 9.5}
    axes.text(end - 0.02 * result.model["n_layers"], height + 0.02, label, **place)


def sample_of(figure: Figure, rows: Iterable[Row]) -> str:
    """How much a figure rests on, and what its intervals are."""
    rows = list(rows)
    parts = [size] if (size := sample_size(rows, figure.unit)) else []
    if any("low" in row for row in rows) and not any(is_known(row.get("low")) for row in rows):
        parts.append("no interval, which needs two documents or more")
    elif figure.sample:
        parts.append(figure.sample)
    return "; ".join(parts)


def is_known(value: Any) -> bool:
    """True for a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def span(values: Iterable[Any]) -> str:
    """A count, or the range of counts: "3,000" or "1,000 to 3,000"; empty when unknown."""
    known = sorted({int(value) for value in values if is_known(value)})
    if not known:
        return ""
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def sample_size(rows: Iterable[Mapping[str, Any]], unit: str = "states") -> str:
    """The sample behind rows: "n = 3,000 states from 26 documents"; empty when unknown."""
    rows = list(rows)
    count, documents = (span(row.get(key) for row in rows) for key in ("rows", "documents"))
    if not count:
        return ""
    source = "1 document" if documents == "1" else f"{documents} documents"
    return f"n = {count} {unit}" + (f" from {source}" if documents else "")
