"""Figures that set the closed form beside training, and one model beside others.

In: the plain-data result of a study. Out: SVG text, or None when the study has nothing for it.
"""

from typing import Any

from layerleap.extras import report_library
from layerleap.show.figures.canvas import (
    COLOURS,
    DASHED,
    INK,
    OTHERS,
    SOFT,
    draw_band,
    drawing,
    dress_layers,
    dress_share,
    legend_above,
    sheet,
    to_svg,
)
from layerleap.show.figures.select import Row, Study, finite
from layerleap.show.figures.words import short

STARTS = {"mat": ("tuned, started from mat", "-", "D"), "identity": ("tuned, from id", DASHED, "v")}


def tuned_figure(study: Study) -> str | None:
    """KL and agreement per layer, closed form against tuned; rows until tuning was ahead."""
    rows = sorted((study.get("tuned") or {}).get("summary") or [], key=lambda row: row["layer"])
    if not rows:
        return None
    starts = {name: [row for row in rows if row["start"] == name] for name in STARTS}
    with drawing():
        figure = sheet(10.4, 3.9)
        grid = figure.subplots(1, 3)
        for axes, key in zip(grid, ("kl", "agreement"), strict=False):
            _draw_tuned(axes, rows, starts, key)
            dress_layers(axes, study["model"]["n_layers"])
        grid[0].set_ylim(bottom=0)
        grid[0].set_title("KL divergence (nats)")
        dress_share(grid[1])
        grid[1].set_title("Agreement")
        _draw_needed(grid[2], starts)
        dress_layers(grid[2], study["model"]["n_layers"])
        grid[2].set_title("Rows until ahead")
        legend_above(figure, grid[0])
        return to_svg(figure, "tuned", _tuned_in_words(starts))


def _draw_tuned(axes: Any, rows: list[Row], starts: dict[str, list[Row]], key: str) -> None:
    closed = {row["layer"]: row[f"{key}_closed"] for row in rows}
    known = {layer: value for layer, value in closed.items() if finite(value) is not None}
    line = {"linewidth": 1.7, "markersize": 4.0, "zorder": 3}
    label = "closed form (mat)"
    axes.plot(list(known), list(known.values()), "o-", color=COLOURS["mat"], label=label, **line)
    for start, group in starts.items():
        known = {row["layer"]: row[f"{key}_tuned"] for row in group}
        known = {layer: value for layer, value in known.items() if finite(value) is not None}
        if known:
            label, dash, marker = STARTS[start]
            style = {"color": COLOURS["tuned"], "linestyle": dash, "marker": marker} | line
            axes.plot(list(known), list(known.values()), label=label, **style)


def _draw_needed(axes: Any, starts: dict[str, list[Row]]) -> None:
    """Rows needed per layer on a log scale; a cross on top where they were not enough."""
    never = []
    for start, group in starts.items():
        _, dash, marker = STARTS[start]
        known = [row for row in group if (finite(row["rows_needed"]) or 0) > 0]
        never += [row["layer"] for row in group if row["rows_needed"] is None]
        if known:
            places = [row["layer"] for row in known], [row["rows_needed"] for row in known]
            style = {"color": COLOURS["tuned"], "linestyle": dash, "marker": marker}
            axes.plot(*places, linewidth=1.7, markersize=4.0, **style)
            _dress_counts(axes)
    axes.set_ylabel("rows of training")
    if never:
        crosses = {"color": SOFT, "markersize": 7, "markeredgewidth": 1.6, "clip_on": False}
        top = axes.get_xaxis_transform()
        axes.plot(never, [0.97] * len(never), "x", transform=top, **crosses)
        place = {"transform": axes.transAxes, "ha": "right", "color": SOFT, "fontsize": 8.5}
        axes.text(0.99, 0.03, "\u00d7 never ahead in this run", **place)


def _dress_counts(axes: Any) -> None:
    """A log scale with plain numbers: training seldom spans many powers of ten."""
    ticker = report_library("matplotlib.ticker")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def _tuned_in_words(starts: dict[str, list[Row]]) -> str:
    parts = []
    for start, rows in starts.items():
        ahead = [row["rows_needed"] for row in rows if row["rows_needed"] is not None]
        span = f", after {min(ahead):,} to {max(ahead):,} rows" if ahead else ""
        if rows:
            parts.append(
                f"started from {start}, training gets ahead of the closed form at {len(ahead)} "
                f"of {len(rows)} layers{span}"
            )
    return "KL and agreement per layer, closed form and tuned: " + "; ".join(parts) + "."


def size_figure(study: Study) -> str | None:
    """Precision@1 against relative depth: one colour per model, mat solid, id dashed."""
    curves: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(study.get("sizes") or [], key=lambda row: row["layer"]):
        if row["metric"] == "precision@1" and finite(row["value"]) is not None:
            curves.setdefault((row["model"], row["map"]), []).append(row)
    if not curves:
        return None
    models = list(dict.fromkeys(row["model"] for row in study["sizes"]))
    palette = dict(zip(models, _palette(len(models)), strict=True))
    with drawing():
        figure = sheet(7.8, 4.6)
        axes = figure.subplots()
        for (model, name), rows in curves.items():
            _draw_size(axes, rows, name, palette[model])
        axes.plot([], [], color=INK, linewidth=1.9, label="mat (linear shortcut)")
        axes.plot([], [], color=INK, linewidth=1.9, linestyle=DASHED, label="id (logit lens)")
        dress_layers(axes, 1, "share of the model's layers already run")
        dress_share(axes)
        ticker = report_library("matplotlib.ticker")
        axes.xaxis.set_major_locator(ticker.MultipleLocator(0.25))
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
        axes.set_ylabel("agreement (Precision@1)")
        legend_above(figure, axes)
        return to_svg(figure, "sizes", _sizes_in_words(curves))


def _palette(n: int) -> list[str]:
    """Not the colours of mat and id, which mean maps on the rest of the page."""
    return [OTHERS[index % len(OTHERS)] for index in range(n)]


def _draw_size(axes: Any, rows: list[Row], name: str, colour: str) -> None:
    n_layers, is_id = rows[0]["n_layers"], name == "id"
    depths = [row["layer"] / n_layers for row in rows]
    values = [row["value"] for row in rows]
    label = "_" if is_id else f"{short(rows[0]['model'])}, {_size(rows[0])}"
    style = {"linewidth": 1.9, "linestyle": DASHED if is_id else "-", "clip_on": False}
    axes.plot(depths, values, color=colour, label=label, **style)
    ends = [
        (depth, finite(row.get("low")), finite(row.get("high")))
        for depth, row in zip(depths, rows, strict=True)
    ]
    draw_band(axes, ends, colour, alpha=0.14)


def _size(row: Row) -> str:
    count = finite(row.get("parameters"))
    size = f", {count / 1e6:,.0f} M parameters" if count else ""
    return f"{row['n_layers']} layers{size}"


def _sizes_in_words(curves: dict[tuple[str, str], list[Row]]) -> str:
    parts = [
        f"{model} {name}: {rows[0]['value']:.0%} at layer {rows[0]['layer']}, "
        f"{rows[len(rows) // 2]['value']:.0%} at layer {rows[len(rows) // 2]['layer']} "
        f"of {rows[0]['n_layers']}"
        for (model, name), rows in curves.items()
    ]
    return "Agreement against relative depth. " + "; ".join(parts) + "."
