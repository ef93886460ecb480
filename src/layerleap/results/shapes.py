"""Heat maps and waterfalls as shapes, which the template `shapes` draws as SVG.

In: numbers and labels. Out: paths, bars and ticks with places in pixels. No script is needed, so a
picture can be copied out of a notebook into a paper.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from layerleap.results.cells import RGB
from layerleap.results.colours import HIGH, LOW, signed_colour
from layerleap.results.columns import Row

LEVELS = 24  # shades of each sign: cells of one shade are one path, which keeps pages small
LETTER = 6.2  # pixels, about, of labels
GREY: RGB = (130, 138, 146)
KINDS: dict[str, RGB] = {"attention": HIGH, "FFN": LOW, "other": GREY}
BAR_HEIGHT = 260


def heat_map(
    title: str,
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    cell: tuple[int, int] | None = None,
    most: float | None = None,
) -> Row:
    """Cells by shade: blue above 0, orange below; a label per row and column, "" for none."""
    n_rows, n_columns = len(values), len(values[0])
    side = max(6, min(22, 720 // n_columns, 480 // n_rows))
    width, height = cell or (side, side)
    largest = most or max(abs(one) for row in values for one in row) or 1.0
    shades: dict[int, list[str]] = defaultdict(list)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if level := round(LEVELS * max(-1.0, min(1.0, value / largest))):
                shades[level].append(f"M{x * width} {y * height}h{width}v{height}h-{width}z")
    top = _room(columns) * 0.8 + 4
    return {
        "form": "heat",
        "title": title,
        "label": f"{title}: largest magnitude {largest:.3g}",
        "cells": [
            (signed_colour(level / LEVELS), "".join(paths))
            for level, paths in sorted(shades.items())
        ],
        "width": n_columns * width,
        "height": n_rows * height,
        "left": _room(rows),
        "top": top,
        "room": max(_room(rows) + n_columns * width + top, LETTER * (len(title) + 20)),
        "rows": [(y * height + height / 2, one) for y, one in enumerate(rows) if one],
        "columns": [(x * width + width / 2, one) for x, one in enumerate(columns) if one],
        "scale": f"darkest: {largest:.2g}",
    }


def waterfall(title: str, steps: Sequence[tuple[str, str, float, str]], total: float) -> Row:
    """Bars that start where the one before ended; steps are (name, tick, value, kind)."""
    ends, height = [0.0], BAR_HEIGHT
    for _, _, value, _ in steps:
        ends.append(ends[-1] + value)
    low, high = min(0.0, *ends), max(0.0, *ends, total)
    scale = (height - 40) / ((high - low) or 1.0)
    width = max(7, min(26, 820 // (len(steps) + 1)))

    def y(value: float) -> float:
        return round(20 + (high - value) * scale, 1)

    strong = sorted((abs(value) for _, _, value, _ in steps), reverse=True)[:4][-1:]
    bars = []
    for place, (name, tick, value, kind) in enumerate([*steps, ("total", "total", total, "")]):
        start = ends[place] if place < len(steps) else 0.0
        top = y(max(start, start + value))
        bars.append(
            {
                "x": place * width,
                "y": top,
                "height": max(0.6, round(abs(value) * scale, 1)),
                "colour": f"rgb{KINDS[kind]}" if kind else "currentColor",
                "title": f"{name}: {value:+.3f}",
                "name": name if strong and abs(value) >= strong[0] and not tick else "",
                "tick": tick,
                "end": y(start + value),
            }
        )
    unit = 10.0 ** math.floor(math.log10(high - low or 1.0))
    step = next(part * unit for part in (0.2, 0.5, 1, 2) if (high - low) / (part * unit) <= 6)
    ticks = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return {
        "form": "waterfall",
        "title": title,
        "label": f"{title}: {len(steps)} steps to {total:.3g}",
        "bars": bars,
        "bar": width,
        "zero": y(0.0),
        "ticks": [(y(one), f"{one:g}".replace("-", "\u2212")) for one in ticks],
        "width": width * len(bars),
        "height": height,
        "bottom": _room([tick for _, tick, _, _ in steps] + ["total"]) * 0.8 + 8,
        "kinds": list(KINDS.items()),
    }


def block_ticks(blocks: Iterable[int]) -> list[str]:
    """Labels of blocks: the first and every fifth."""
    return [f"L{block}" if block == 1 or block % 5 == 0 else "" for block in blocks]


def _room(labels: Sequence[str]) -> float:
    """Pixels that the longest label takes."""
    return 8 + LETTER * max(map(len, labels), default=0)
