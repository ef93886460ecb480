"""Axes of matplotlib, dressed: scales, ticks, limits, reference lines and legends."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from layerleap.extras import report_library
from layerleap.show.figures.canvas import GRID, INK, SOFT
from layerleap.study.figures import Axis, Mark

RAISED = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)


def dress(axes: Any, which: str, axis: Axis, n_layers: int, categories: Sequence[Any]) -> None:
    """Give the x or the y axis its label, scale, ticks and limits."""
    ticker, side = report_library("matplotlib.ticker"), getattr(axes, f"{which}axis")
    limits = getattr(axes, f"set_{which}lim")
    getattr(axes, f"set_{which}label")(axis.label)
    if axis.scale == "layer":
        limits(-0.02 * n_layers, n_layers * 1.02)
        side.set_major_locator(ticker.MaxNLocator(6, integer=True))
    elif axis.scale == "share":
        if axis.low is None and axis.high is None:
            limits(0, 1)
        side.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        side.set_major_formatter(ticker.FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    elif axis.scale == "log":
        getattr(axes, f"set_{which}scale")("log")
        low, high = getattr(axes, f"get_{which}lim")()
        # Few powers of ten: ticks in between too, but no more than have room in a small panel.
        between = (1, 2, 5) if high < 30 * low else (1, 3) if high < 300 * low else (1,)
        side.set_major_locator(ticker.LogLocator(subs=between))
        side.set_major_formatter(ticker.FuncFormatter(_log_tick))
        side.set_minor_formatter(ticker.NullFormatter())
    elif axis.scale == "times":
        getattr(axes, f"set_{which}scale")("log", base=2)
        side.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}\u00d7"))
        side.set_minor_locator(ticker.NullLocator())
        low, high = getattr(axes, f"get_{which}lim")()
        limits(low, max(high, 2.0))  # room to say that beyond 1 it costs more
    elif axis.scale == "category":
        getattr(axes, f"set_{which}ticks")(range(len(categories)), [str(c) for c in categories])
    if axis.low is not None or axis.high is not None:
        limits(axis.low, axis.high)
    if axis.scale == "category" and which == "y":
        axes.set_ylim(len(categories) - 0.45, -0.55)  # the first category on top


def _log_tick(value: float, _position: int) -> str:
    """A number as it is, or as a power of ten, written without mathematical typesetting."""
    if 0.001 <= value <= 1000:
        return f"{value:g}"
    exponent = round(math.log10(value)) if value > 0 else 0
    if value > 0 and not math.isclose(value, 10.0**exponent):  # a tick between powers of ten
        return f"{value / 1000:g}k" if 1000 < value < 1e6 else f"{value:g}"
    return "10" + str(exponent).translate(RAISED)


def grid_for(axes: Any, x: Axis, y: Axis) -> None:
    """Quiet grid lines along the axes that carry values."""
    if y.scale != "category":
        axes.grid(axis="y", color=GRID, linewidth=0.8)
    if y.scale == "category" or x.scale in ("number", "times", "log", "share"):
        axes.grid(axis="x", color=GRID, linewidth=0.8)


def draw_marks(axes: Any, marks: Iterable[Mark]) -> None:
    """Reference lines and shaded stretches, with their meaning written beside them."""
    for mark in marks:
        line, span = (
            (axes.axvline, axes.axvspan) if mark.axis == "x" else (axes.axhline, axes.axhspan)
        )
        if mark.to is None:
            line(mark.at, color=SOFT, linewidth=1.1, linestyle=(0, (2, 2)), zorder=1)
        else:
            keep = axes.get_xlim(), axes.get_ylim()
            span(mark.at, mark.to, color="#f1ede6", linewidth=0, zorder=0)
            axes.set_xlim(keep[0])
            axes.set_ylim(keep[1])
        style = {"fontsize": 8.5, "color": SOFT, "va": "bottom", "ha": "left"}
        if mark.axis == "y":
            style |= {"transform": axes.get_yaxis_transform(), "va": "top"}
            axes.text(0.01, mark.at, mark.label, **style)
        elif axes.yaxis_inverted():  # categories fill the panel
            style |= {"transform": axes.get_xaxis_transform(), "ha": "center"}
            axes.text(mark.at, 1.005, mark.label, **style)
        else:
            style |= {"transform": axes.get_xaxis_transform()}
            axes.text(mark.at, 0.02, f" {mark.label}" if mark.label else "", **style)


def legend_above(figure: Any, panels: Sequence[Any]) -> None:
    """One legend for all panels, above them, where it can cover no line."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    longest, width = max(map(len, entries)), figure.get_size_inches()[0]
    columns = max(1, min(len(entries), int(width * 13 / (longest + 8))))
    look = {"loc": "outside upper left", "fontsize": 9.5, "labelcolor": INK}
    figure.legend(list(entries.values()), list(entries), ncols=columns, **look)


def zoom_in(axes: Any, low: float, high: float, points: Iterable[tuple[float, float]]) -> None:
    """Show y from `low` to `high`, and the x range of the points that lie in there."""
    axes.set_ylim(low, high)
    reached = [x for x, y in points if low <= y <= high]
    if reached:
        right = axes.get_xlim()[1]
        axes.set_xlim(min(min(reached) - 1, right - 2), right)
