"""The figure of calibrated exits: was the promise kept on fresh text?

In: the plain-data result of a study. Out: SVG text, or None when the study has nothing for it.
"""

from typing import Any

from layerleap.extras import report_library
from layerleap.show.figures.canvas import GRID, INK, SOFT, drawing, legend_above, sheet, to_svg
from layerleap.show.figures.select import Row, Study, finite
from layerleap.show.figures.words import short

KEPT, BROKEN = "#146c43", "#a4161a"
SHAPES = ("o", "s", "D", "^")


def calibrated_figure(study: Study) -> str | None:
    """Disagreement on fresh text with its interval, per calibrated rule, against the tolerance."""
    found = study.get("calibrated") or {}
    rows = [row for row in found.get("rows") or [] if _measured(row)]
    if not rows:
        return None
    texts = list(dict.fromkeys(each["text"] for row in rows for each in row["fresh"]))
    with drawing():
        figure = sheet(10.4, 1.5 + 0.46 * len(rows) * max(1.0, 0.55 * len(texts)))
        axes = figure.subplots()
        for place, row in enumerate(rows):
            _draw_row(axes, place, row, texts)
        axes.axvline(found["tolerance"], color=INK, linewidth=1.3, linestyle=(0, (4, 2)), zorder=1)
        _dress(axes, rows, found["tolerance"])
        _keys(axes, texts)
        legend_above(figure, axes, columns=3)
        return to_svg(figure, "calibrated", _in_words(rows, found["tolerance"]))


def _measured(row: Row) -> list[Row]:
    return [each for each in row["fresh"] if finite(each.get("disagreement")) is not None]


def _draw_row(axes: Any, place: int, row: Row, texts: list[str]) -> None:
    for each in _measured(row):
        index = texts.index(each["text"])
        height = place + (index - (len(texts) - 1) / 2) * 0.34
        colour = KEPT if each["holds"] else BROKEN
        low, high = finite(each.get("low")), finite(each.get("high"))
        if low is not None and high is not None:
            axes.plot([low, high], [height] * 2, color=colour, linewidth=1.5, zorder=2)
        style = {"color": colour, "markersize": 6.5, "markeredgewidth": 1.4, "zorder": 3}
        shape = SHAPES[index % len(SHAPES)]
        fill = {"markerfacecolor": colour if each["promised"] else "white"}
        axes.plot([each["disagreement"]], [height], shape, clip_on=False, **style | fill)
        place_of = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8.5}
        axes.text(1.01, height, _verdict(row, each), color=SOFT, **place_of)


def _verdict(row: Row, fresh: Row) -> str:
    if row["knob"] is None:
        return "exits nowhere"
    saved = finite(fresh.get("saved"))
    text = "" if saved is None else f"{saved:.1f} layers saved"
    if fresh["holds"]:
        return text
    return f"{text}; {'BROKEN' if fresh['promised'] else 'above, not promised'}".lstrip("; ")


def _dress(axes: Any, rows: list[Row], tolerance: float) -> None:
    ticker = report_library("matplotlib.ticker")
    ends = [finite(each.get("high")) or each["disagreement"] for r in rows for each in _measured(r)]
    axes.set_xlim(0, 1.08 * max(*ends, tolerance))
    axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=None))
    axes.set_xlabel("disagreement with the full model on fresh text")
    labels = [f"{row['map']}, {row['rule']}\n{short(row['method'])}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, color=INK, fontsize=8.5)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
    axes.text(tolerance, 1.005, f"tolerance {100 * tolerance:g} %", fontsize=8.5, **place)


def _keys(axes: Any, texts: list[str]) -> None:
    """The legend: shape is the text, filling the promise, colour (and a word) the outcome."""
    style = {"linestyle": "", "markersize": 6.5, "markeredgewidth": 1.4}
    for index, text in enumerate(texts):
        shape = SHAPES[index % len(SHAPES)]
        axes.plot([], [], color=SOFT, marker=shape, label=f"read on {short(text)}", **style)
    bare = {"color": SOFT, "marker": "o", "markerfacecolor": "white"}
    axes.plot([], [], label="hollow: nothing was promised for this text", **bare | style)
    axes.plot([], [], color=KEPT, marker="o", label="within the tolerance", **style)
    axes.plot([], [], color=BROKEN, marker="o", label="above it", **style)


def _in_words(rows: list[Row], tolerance: float) -> str:
    parts = [
        f"{row['rule']} through {row['map']} ({row['method']}) on {each['text']}: "
        f"{each['disagreement']:.1%}, {'within' if each['holds'] else 'above'}"
        for row in rows
        for each in _measured(row)
    ]
    return f"Disagreement on fresh text against a tolerance of {tolerance:.1%}. " + "; ".join(parts)
