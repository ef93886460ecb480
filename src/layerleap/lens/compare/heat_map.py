"""The similarity of every pair of blocks as a heat map: shapes that a template draws."""

from collections import defaultdict

from layerleap.lens.compare.matching import Matching
from layerleap.results.colours import saturation_colour
from layerleap.results.columns import Row

SPACES = {"vocabulary": "in the vocabulary", "raw": "raw coordinates (control)"}
MEASURED = {"best": "best match", "mean": "mean |correlation|"}
LEVELS = 16  # shades of a heat map: cells of one shade are one path, which keeps pages small
LONGEST, MARGIN = 270, 26  # pixels: the longer side of a heat map, and the room for numbers


def heat_map(one: Matching) -> Row:
    """Paths of its cells by colour, a frame around each match, and the numbers of blocks."""
    values = [value for row in one.similarity for value in row]
    low, high = min(values), max(values)
    # The side of a cell, so that maps of small and of deep models are about as large.
    cell = max(4, min(24, LONGEST // max(len(one.blocks_a), len(one.blocks_b))))
    shades: dict[int, list[str]] = defaultdict(list)
    for y, row in enumerate(one.similarity):
        for x, value in enumerate(row):
            level = int((LEVELS - 1) * (value - low) / (high - low)) if high > low else 0
            shades[level].append(f"M{x * cell} {y * cell}h{cell}v{cell}h-{cell}z")
    rows, columns = ({b: i for i, b in enumerate(bs)} for bs in (one.blocks_a, one.blocks_b))
    side = cell - 2
    framed = "".join(
        f"M{columns[match.b] * cell + 1} {rows[match.a] * cell + 1}h{side}v{side}h-{side}z"
        for match in one.matches
    )
    measured, space = MEASURED[one.measure], SPACES[one.space]
    hits = f"{one.hits} of {len(one.matches)} blocks matched to their own number"
    return {
        "lines": (measured, space, f"{low:.3f} (light) to {high:.3f} (dark)"),
        "label": f"{one.kind}, {measured}, {space}: {hits}",
        "cells": [
            (saturation_colour(LEVELS - 1 - level, LEVELS), "".join(paths))
            for level, paths in sorted(shades.items())
        ],
        "framed": framed,
        "margin": MARGIN,
        "width": cell * len(columns),
        "height": cell * len(rows),
        "rows": _ticks(one.blocks_a, cell),
        "columns": _ticks(one.blocks_b, cell),
    }


def _ticks(blocks: tuple[int, ...], cell: int) -> list[tuple[int, int]]:
    """Places and numbers: of every block where there is room, or the first and every fifth."""
    step = 1 if cell >= 14 else 5
    return [
        (place * cell + cell // 2, block)
        for place, block in enumerate(blocks)
        if place == 0 or block % step == 0
    ]
