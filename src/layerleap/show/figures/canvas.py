"""Sheets to draw on: matplotlib without global state, and SVG that can live inside a page.

In: curves and R2 cells. Out: axes with ink on them, and SVG text whose bytes depend only on
the data and whose ids carry a prefix, so that several pictures fit into one HTML page.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from layerleap.extras import report_library
from layerleap.show.figures.select import Curve

INK, SOFT, GRID = "#1b2733", "#5b6875", "#e3e8ed"
# Okabe and Ito's colours: told apart with every common kind of colour blindness.
COLOURS = {"mat": "#0072b2", "id": "#d55e00", "tuned": "#009e73"}
OTHERS = ("#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#4d4d4d")
NAMES = {
    "mat": "mat (linear shortcut)",
    "id": "id (logit lens)",
    "tuned": "tuned (trained lens)",
}
MARKERS = {"id": "s", "tuned": "D"}
DASHED = (0, (4, 1.6))
# The layout is measured with DejaVu Sans, which comes with matplotlib and is wider than these.
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LONG_NUMBER = re.compile(r"-?\d+\.\d{4,}(?!\d|e)")
PLACED = ("d", "x", "y", "transform", "points", "width", "height")
RAISED = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be selected, searched and read aloud
    "svg.hashsalt": "layerleap",
    "text.parse_math": False,  # a "$" in the name of a model is a dollar sign
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa5b1",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "savefig.facecolor": "white",
}


@contextmanager
def drawing() -> Iterator[None]:
    """Our settings for the time of one picture; a glyph the font lacks is not worth a warning."""
    matplotlib = report_library("matplotlib")
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def sheet(width: float, height: float, layout: str = "constrained") -> Any:
    """An empty figure, in inches, that pyplot does not know of."""
    figure = report_library("matplotlib.figure").Figure(figsize=(width, height), layout=layout)
    report_library("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def colour_of(name: str, index: int = 0) -> str:
    """The colour of a map; maps we have no colour for take turns by `index`."""
    return COLOURS.get(name, OTHERS[index % len(OTHERS)])


def draw_curve(axes: Any, curve: Curve, label: str, colour: str) -> None:
    """A line with a marker per layer, and its 95 % band where the study has one."""
    points = curve.points
    few = len(points) <= 40  # beyond that the markers would touch
    axes.plot(
        [point.layer for point in points],
        [point.value for point in points],
        color=colour,
        linewidth=1.9,
        linestyle=DASHED if curve.map == "id" else "-",
        marker=MARKERS.get(curve.map, "o") if few else None,
        markersize=3.4,
        label=label,
        clip_on=False,
        zorder=3,
    )
    draw_band(axes, [(point.layer, point.low, point.high) for point in points], colour)


def draw_band(
    axes: Any,
    ends: list[tuple[float, float | None, float | None]],
    colour: str,
    alpha: float = 0.22,
) -> None:
    """The 95 % band through (place, low, high), leaving out places without an interval."""
    known = [(x, low, high) for x, low, high in ends if low is not None and high is not None]
    if known:
        places, low, high = zip(*known, strict=True)
        axes.fill_between(places, low, high, color=colour, alpha=alpha, linewidth=0)


def draw_maps(axes: Any, curves: list[Curve]) -> None:
    """One curve per map, in the colours and under the names that maps have everywhere."""
    for index, each in enumerate(curves):
        draw_curve(axes, each, NAMES.get(each.map, each.map), colour_of(each.map, index))


def draw_floor(axes: Any, value: float) -> None:
    """The least surprisal there can be, as a dotted line with its meaning beside it."""
    axes.axhline(value, color=SOFT, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
    axes.annotate(
        f"floor: the model's own top token, {value:.2f}",
        (0, value),
        xytext=(2, -4),
        textcoords="offset points",
        color=SOFT,
        fontsize=8.5,
        va="top",
    )


def legend_above(figure: Any, axes: Any, columns: int | None = None) -> None:
    """One legend for all panels, over them, where it can cover no line."""
    handles, labels = axes.get_legend_handles_labels()
    if columns is None:
        columns = len(labels) if len(labels) < 4 else 2  # names of texts are long
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=9.5)


def dress_layers(axes: Any, n_layers: int, label: str = "layer") -> None:
    """The layer axis: whole numbers from 0 to the last layer, and a quiet grid."""
    ticker = report_library("matplotlib.ticker")
    axes.set_xlim(-0.02 * n_layers, n_layers * 1.02)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.set_xlabel(label)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def dress_share(axes: Any) -> None:
    """The upright axis as a share, from 0 to 100 %."""
    ticker = report_library("matplotlib.ticker")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_locator(ticker.MultipleLocator(0.25))
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))


def dress_powers(axes: Any) -> None:
    """The upright axis as powers of ten, written without mathematical typesetting."""
    ticker = report_library("matplotlib.ticker")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(_power))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _power(value: float, _position: int) -> str:
    exponent = round(math.log10(value)) if value > 0 else 0
    return "10" + str(exponent).translate(RAISED)


def draw_r2(axes: Any, cells: dict[tuple[int, int], float], n_layers: int) -> Any:
    """A triangle of cells, colour = R2 clipped to [0, 1]; returns what a colour bar needs."""
    numpy = report_library("numpy")
    values = numpy.full((n_layers, n_layers), numpy.nan)
    for (src, dst), r2 in cells.items():
        values[dst - 1, src] = min(max(r2, 0.0), 1.0)
    picture = axes.imshow(
        numpy.ma.masked_invalid(values),
        origin="lower",
        extent=(-0.5, n_layers - 0.5, 0.5, n_layers + 0.5),
        interpolation="none",  # one pixel per pair: 80 layers stay small, and edges sharp
        cmap=report_library("matplotlib").colormaps["viridis"].resampled(128),
        vmin=0,
        vmax=1,
    )
    ticker = report_library("matplotlib.ticker")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.set(aspect="equal", xlabel="from layer", ylabel="to layer")
    return picture


def to_svg(figure: Any, name: str, label: str) -> str:
    """The figure as SVG text for a page: `name` prefixes its ids, `label` is read aloud."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(stream.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # Metadata names outside addresses; the style sheet would reach the whole page.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    renamed = _new_ids(root, name)
    for element in root.iter():
        element.tag = _local(element.tag)
        old = {_local(key): value for key, value in element.attrib.items()}
        element.attrib.clear()
        for key, value in old.items():
            if key != "id" or value in renamed:
                element.attrib[key] = _own(key, value, renamed)
    root.attrib |= {
        "xmlns": "http://www.w3.org/2000/svg",
        "role": "img",
        "aria-label": label,
        "style": "stroke-linejoin:round;stroke-linecap:butt",
    }
    return ElementTree.tostring(root, encoding="unicode")


def to_png(figure: Any, dpi: int = 160) -> bytes:
    """The figure as PNG bytes, without the name of the program that made it."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
    return stream.getvalue()


def _local(name: str) -> str:
    return name.rsplit("}", 1)[-1]


def _new_ids(root: ElementTree.Element, prefix: str) -> dict[str, str]:
    """New names, in the order of the document, for the ids that something refers to.

    Matplotlib's names hash the last bits of its layout, which differ from run to run.
    """
    used = {
        target
        for element in root.iter()
        for key, value in element.attrib.items()
        for target in re.findall(r"^#(.+)$" if _local(key) == "href" else r"url\(#([^)]+)\)", value)
    }
    found = [element.attrib["id"] for element in root.iter() if element.get("id") in used]
    return {old: f"{prefix}-{place}" for place, old in enumerate(found)}


def _own(key: str, value: str, renamed: dict[str, str]) -> str:
    """An attribute's value with our ids, our fonts, and a thousandth of a point as its grain."""
    if key == "id":
        return renamed[value]
    if key == "href":
        return f"#{renamed[value[1:]]}" if value.startswith("#") else value
    if key == "style":
        return re.sub(r"'DejaVu Sans'[^;]*", FONTS, value)
    if key == "clip-path":
        return re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{renamed[match[1]]})", value)
    return (
        LONG_NUMBER.sub(lambda match: f"{float(match[0]):.3f}", value) if key in PLACED else value
    )
