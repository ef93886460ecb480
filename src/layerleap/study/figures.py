"""Figures of a study, described as data: which rows to draw, and how.

In: a finished study. Out: rows that `layerleap.show.figures` draws, whatever study they come from.

A figure is one of four kinds, and its rows have the same few keys:

    lines      x, y, low, high     one line per `line`, a band where low and high are known
    dots       x, y, low, high     one point with an interval per row; y or x may be a category
    bars       x, y, low, high     one group of bars per x, a colour per `line`
    heatmap    x, y, value         one cell per row

Every row may have a `panel`; panels are drawn side by side. `rows` and `documents` say how much a
row rests on, and become the sample size under the figure. A row may also have its own `colour`, be
`hollow` (dots), be `muted` (bars: grey, and not used for the scale), and carry a `note`, which is
written beside a dot, or once in the corner of its panel.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from layerleap.errors import check_choice

if TYPE_CHECKING:
    from layerleap.study.result import StudyResult

Row = dict[str, Any]
Kind = Literal["lines", "dots", "bars", "heatmap"]
Scale = Literal["number", "layer", "share", "log", "times", "category"]
Style = Literal["solid", "dashed", "points", "star", "range"]


@dataclass(frozen=True)
class Axis:
    """One axis: its label and scale.

    "layer" runs from 0 to the model's last layer, "share" from 0 to 100 %, or from `low` as far as
    the values reach, "times" is a ratio on a log scale, "category" has the values of the rows as
    ticks, in their order.
    """

    label: str = ""
    scale: Scale = "number"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        check_choice(self.scale, Scale, "scale")


@dataclass(frozen=True)
class Line:
    """How the rows of one `line` look; lines without an entry get the next free colour."""

    label: str = ""
    colour: str = ""  # a name of `show.figures.canvas.PALETTE`
    marker: str = "o"  # "" for none
    style: Style = "solid"
    band: float = 0.2  # opacity of the interval; 0 leaves it out
    width: float = 1.9

    def __post_init__(self) -> None:
        check_choice(self.style, Style, "style")


# Lenses look the same in every figure, and are labelled with the titles of their kinds of maps.
LENSES = {
    "linear": Line(colour="blue"),
    "logit": Line(colour="orange", marker="s", style="dashed"),
    "tuned": Line(colour="green", marker="D"),
}


@dataclass(frozen=True)
class Mark:
    """A reference line at x or y, or a shaded stretch up to `to`; in one panel, or in all."""

    axis: Literal["x", "y"]
    at: float
    label: str = ""
    to: float | None = None
    panel: str | None = None

    def __post_init__(self) -> None:
        check_choice(self.axis, ("x", "y"), "axis")


@dataclass(frozen=True)
class Figure:
    """One figure of a section."""

    key: str  # its id on the page, and what findings refer to
    title: str
    how: str  # how to read it
    rows: Callable[["StudyResult"], Iterable[Row]]
    kind: Kind = "lines"
    x: Axis = Axis("layer", "layer")
    y: Axis = Axis()
    lines: Mapping[str, Line] = field(default_factory=dict)
    marks: Callable[["StudyResult"], Iterable[Mark]] = lambda _: ()
    zoom: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # y range by panel
    columns: int = 3  # panels in a row, at most
    size: tuple[float, float] = (3.4, 3.7)  # of a panel, in inches
    dodge: bool = False  # dots of several lines in one category are drawn beside each other
    value: Axis = Axis("", low=0, high=1)  # colours of a heat map
    cell_form: str = ""  # a heat map writes its values in this form
    share_y: bool = True
    unit: str = "states"  # what `rows` counts
    sample: str = "bands and intervals: 95 %, over documents"
    narrow: bool = False  # two such figures stand side by side

    def __post_init__(self) -> None:
        check_choice(self.kind, Kind, "kind")


def short(name: str, limit: int = 28) -> str:
    """A name that fits into a legend: cut in the middle, because paths differ at their ends."""
    end = (limit - 1) * 2 // 3
    return name if len(name) <= limit else f"{name[: limit - 1 - end]}\u2026{name[-end:]}"
