"""Matplotlib without global state, and SVG that can be part of a page.

The bytes of SVG text depend only on the data, and its ids carry a prefix, so that several figures
fit into one HTML page.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

from layerleap.extras import report_library

INK, SOFT, GRID = "#1b2733", "#5b6875", "#e3e8ed"
# The first few are Okabe and Ito's: distinct with every common kind of colour blindness.
PALETTE = {
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "olive": "#8a6d00",
    "sky": "#56b4e9",
    "black": "#4d4d4d",
    "yellow": "#f0e442",
    "purple": "#4b2e83",
    "grey": "#9aa5b1",
    "pale": "#b8c2cc",
    "sand": "#f0c98d",
    "amber": "#e08a1e",
    "soft": SOFT,
    "good": "#146c43",
    "bad": "#a4161a",
}
FREE = ("green", "pink", "olive", "sky", "black", "purple")  # for lines without a colour
DASHED = (0, (4, 1.6))
# The layout is measured with DejaVu Sans, which comes with matplotlib and is wider than these.
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
LONG_NUMBER = re.compile(r"-?\d+\.\d{4,}(?!\d|e)")
PLACED = ("d", "x", "y", "transform", "points", "width", "height")
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
    """Our settings, for one figure; a glyph that the font lacks is not worth a warning."""
    matplotlib = report_library("matplotlib")
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def new_figure(width: float, height: float, layout: str = "constrained") -> Any:
    """An empty figure, in inches, that pyplot does not know of."""
    figure = report_library("matplotlib.figure").Figure(figsize=(width, height), layout=layout)
    report_library("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


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
                element.attrib[key] = _rewritten(key, value, renamed)
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
    ids = [element.attrib["id"] for element in root.iter() if element.get("id") in used]
    return {old: f"{prefix}-{place}" for place, old in enumerate(ids)}


def _rewritten(key: str, value: str, renamed: dict[str, str]) -> str:
    """An attribute's value with our ids, our fonts, and a thousandth of a point as its grain."""
    if key == "id":
        return renamed[value]
    if key == "href":
        return f"#{renamed[value[1:]]}" if value.startswith("#") else value
    if key == "style":
        return re.sub(r"'DejaVu Sans'[^;]*", FONTS, value)
    if key == "clip-path":
        return re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{renamed[match[1]]})", value)
    if key not in PLACED:
        return value
    return LONG_NUMBER.sub(lambda match: f"{float(match[0]):.3f}", value)
