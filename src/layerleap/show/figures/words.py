"""Words that figures share: names that fit into a legend, and curves for those who listen.

In: names and curves. Out: text.
"""

from layerleap.show.figures.canvas import NAMES
from layerleap.show.figures.select import UNFITTED, Curve


def fit_label(curve: Curve) -> str:
    """The map, and the text it was fitted on if it is one of several fits."""
    if curve.map in UNFITTED:
        return NAMES[curve.map]
    return f"{curve.map} fitted on {short(curve.fit, 36)}"


def short(text: str, limit: int = 28) -> str:
    """Cut in the middle: paths differ at their ends, and so do fits of different sizes."""
    end = (limit - 1) * 2 // 3
    return text if len(text) <= limit else f"{text[: limit - 1 - end]}\u2026{text[-end:]}"


def curves_in_words(what: str, curves: list[Curve], unit: str) -> str:
    """The ends of each curve, for those who hear the figure instead of seeing it."""
    parts = []
    for each in curves:
        first, last = each.points[0], each.points[-1]
        ends = [f"{p.value:.0%}" if unit == "%" else f"{p.value:.2f} {unit}" for p in (first, last)]
        parts.append(
            f"{each.map if each.map in UNFITTED else fit_label(each)} goes from {ends[0]} "
            f"at layer {first.layer} to {ends[1]} at layer {last.layer}"
        )
    return f"{what} per layer: " + "; ".join(parts) + "."
