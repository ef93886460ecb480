"""Figures of other ways through the network: parts of blocks replaced, jumps and blocks in turn.

In: the plain-data result of a study. Out: SVG text, or None when the study has nothing for it.
"""

from typing import Any

from layerleap.show.figures.canvas import (
    COLOURS,
    GRID,
    INK,
    OTHERS,
    draw_band,
    draw_curve,
    draw_floor,
    draw_maps,
    drawing,
    dress_layers,
    dress_share,
    legend_above,
    sheet,
    to_svg,
)
from layerleap.show.figures.select import Curve, Point, Row, Study, finite, home_curves

PARTS = {
    "attn": "attention replaced",
    "ffn": "feed-forward replaced",
    "norms": "norms replaced",
}
PART_COLOURS = {"attn": OTHERS[0], "ffn": OTHERS[1], "norms": OTHERS[2]}
WHOLE = ("mat", "id")


def part_curves(study: Study, metric: str, bias: bool) -> list[Curve]:
    """One curve over start layers per replaced part, fitted with or without an intercept."""
    rows = (study.get("parts") or {}).get("scores") or []
    names = dict.fromkeys([*PARTS, *(row["map"] for row in rows)])
    curves = []
    for name in names:
        points = [
            Point(int(row["layer"]), value, finite(row.get("low")), finite(row.get("high")))
            for row in rows
            if (row["map"], row["metric"], bool(row["bias"])) == (name, metric, bias)
            and (value := finite(row["value"])) is not None
        ]
        points.sort(key=lambda point: point.layer)
        curves.append(Curve(name, "-", "-", metric, tuple(points)))
    return [each for each in curves if each.points]


def part_figure(study: Study) -> str | None:
    """Precision@1 and surprisal by start layer: each part replaced, beside whole shortcuts."""
    panels = {metric: part_curves(study, metric, False) for metric in ("precision@1", "surprisal")}
    panels = {metric: curves for metric, curves in panels.items() if curves}
    if not panels:
        return None
    with drawing():
        figure = sheet(4.7 * len(panels) + 0.3, 4.3)
        grid = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (metric, curves) in zip(grid, panels.items(), strict=True):
            _draw_parts(axes, curves, part_curves(study, metric, True))
            whole = [each for each in home_curves(study, metric) if each.map in WHOLE]
            draw_maps(axes, whole)
            _dress_metric(axes, metric, whole, study["model"]["n_layers"])
        legend_above(figure, grid[0], columns=3)
        return to_svg(figure, "parts", _parts_in_words(next(iter(panels.values()))))


def _draw_parts(axes: Any, curves: list[Curve], biased: list[Curve]) -> None:
    for index, each in enumerate(curves):
        colour = PART_COLOURS.get(each.map, OTHERS[index % len(OTHERS)])
        draw_curve(axes, each, PARTS.get(each.map, each.map), colour)
    for index, each in enumerate(biased):
        places = [point.layer for point in each.points], [point.value for point in each.points]
        colour = PART_COLOURS.get(each.map, OTHERS[index % len(OTHERS)])
        axes.plot(*places, color=colour, linewidth=1.0, linestyle=(0, (2, 1.6)), zorder=2)
    if biased:  # one entry for all of them: the colour already says which part it is
        axes.plot(
            [], [], color=INK, linewidth=1.0, linestyle=(0, (2, 1.6)), label="same, intercept"
        )


def _dress_metric(axes: Any, metric: str, whole: list[Curve], n_layers: int) -> None:
    dress_layers(axes, n_layers, "layer from which on parts are replaced")
    if metric == "surprisal":
        axes.set_ylim(bottom=0)
        axes.set_ylabel("surprisal (nats)")
        floors = [point.value for each in whole if (point := each.at(n_layers))]
        if floors:
            draw_floor(axes, floors[0])
    else:
        dress_share(axes)
        axes.set_ylabel("share of states")
    axes.set_title(metric.capitalize())


def _parts_in_words(curves: list[Curve]) -> str:
    parts = [
        f"{PARTS.get(each.map, each.map)} from layer {each.points[0].layer} on, "
        f"{each.points[0].value:.2f}; from layer {each.points[-1].layer} on, "
        f"{each.points[-1].value:.2f}"
        for each in curves
    ]
    return f"{curves[0].metric} by start layer. " + ". ".join(parts) + "."


def alternation_figure(study: Study) -> str | None:
    """Precision@1 against blocks run: one jump, jumps and blocks in turn, and the best by R2."""
    rows = [
        row
        for row in study.get("schedules") or []
        if row["metric"] == "precision@1" and finite(row["value"]) is not None
    ]
    if not rows:
        return None
    kinds: dict[str, list[Row]] = {"single jump": [], "round robin": [], "best R2": []}
    for row in sorted(rows, key=lambda row: (row["blocks"], row["schedule"])):
        kinds.setdefault(row["kind"], []).append(row)
    with drawing():
        figure = sheet(7.6, 4.5)
        axes = figure.subplots()
        for index, (kind, group) in enumerate(kinds.items()):
            if group:
                _draw_schedules(axes, kind, group, index)
        dress_layers(axes, study["model"]["n_layers"], "blocks that were run; the rest is jumped")
        dress_share(axes)
        axes.grid(axis="x", color=GRID, linewidth=0.5)
        axes.set_ylabel("agreement (Precision@1)")
        legend_above(figure, axes, columns=2)
        return to_svg(figure, "alternation", _schedules_in_words(kinds))


def _draw_schedules(axes: Any, kind: str, rows: list[Row], index: int) -> None:
    """A line for what is one family with one member per count of blocks; else dots."""
    places, values = [row["blocks"] for row in rows], [row["value"] for row in rows]
    if kind in ("single jump", "best R2"):
        first = kind == "single jump"
        colour = COLOURS["mat"] if first else OTHERS[2]
        style = {
            "linewidth": 1.9,
            "marker": None if first else "D",
            "markersize": 4.2,
            "clip_on": False,
        }
        axes.plot(places, values, color=colour, label=_KINDS[kind], zorder=3, **style)
        ends = [(row["blocks"], finite(row.get("low")), finite(row.get("high"))) for row in rows]
        draw_band(axes, ends, colour, alpha=0.16)
        return
    colour = OTHERS[1] if kind == "round robin" else OTHERS[index % len(OTHERS)]
    for row in rows:
        low, high = finite(row.get("low")), finite(row.get("high"))
        if low is not None and high is not None:
            axes.plot([row["blocks"]] * 2, [low, high], color=colour, linewidth=0.8, alpha=0.5)
    axes.plot(
        places, values, "o", color=colour, markersize=4.4, label=_KINDS.get(kind, kind), zorder=4
    )


_KINDS = {
    "single jump": "single jump at the end",
    "round robin": "round robin: blocks and jumps in turn",
    "best R2": "jumps where R\u00b2 is highest",
}


def _schedules_in_words(kinds: dict[str, list[Row]]) -> str:
    parts = [
        f"{kind}: {len(rows)} schedules of {rows[0]['blocks']} to {rows[-1]['blocks']} blocks, "
        f"from {min(row['value'] for row in rows):.0%} to {max(row['value'] for row in rows):.0%}"
        for kind, rows in kinds.items()
        if rows
    ]
    return "Agreement against the number of blocks that were run. " + "; ".join(parts) + "."
