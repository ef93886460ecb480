"""Figures of saturation: where ranks settle, in what order, and what a settled state does.

In: the plain-data result of a study of saturation. Out: SVG text, or None without data for it.
"""

from typing import Any

from layerleap.extras import report_library
from layerleap.show.figures.canvas import (
    COLOURS,
    DASHED,
    GRID,
    INK,
    NAMES,
    OTHERS,
    SOFT,
    draw_band,
    drawing,
    dress_share,
    legend_above,
    sheet,
    to_svg,
)
from layerleap.show.figures.select import Row, Study, finite

# By kind of state put in: colour, marker, and what the legend calls it.
KINDS = {
    "donor": (COLOURS["mat"], "o", "donor: settled"),
    "unsaturated": (COLOURS["id"], "s", "reads the same, not settled"),
    "copy": ("#8a6d00", "^", "another row's state"),
    "random": ("#cc79a7", "v", "random direction"),
    "no-op": ("#4d4d4d", "D", "its own state"),
}


def _panels(count: int, height: float = 3.9) -> tuple[Any, list[Any]]:
    """A row of panels, wide enough for each."""
    figure = sheet(10.4 if count > 1 else 6.4, height)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def once(axes: Any, label: str) -> str | None:
    """The label, unless the legend has it already."""
    return None if label in axes.get_legend_handles_labels()[1] else label


def place_figure(study: Study) -> str | None:
    """Mean saturation rank of every rank, as bars with intervals; random walks beside them."""
    found = study["order"]
    if not found:
        return None
    with drawing():
        figure, panels = _panels(len(found))
        for axes, (name, one) in zip(panels, found.items(), strict=True):
            bars = [
                ("all positions", COLOURS.get(name, OTHERS[0]), _places(one, False)),
                ("top token settled early", "#9aa5b1", _places(one, True)),
                ("random walks", "#f0c98d", one["walk_places"]),
            ]
            for index, (label, colour, rows) in enumerate(bars):
                _bars(axes, rows, 0.27 * (index - 1), colour, label)
            axes.set_title(f"Through {NAMES.get(name, name)}")
            axes.set_xlabel("rank of the token in the final prediction")
            axes.set_xticks(range(1, one["k"] + 1))
            axes.grid(axis="y", color=GRID, linewidth=0.8)
        panels[0].set_ylabel("mean saturation rank")
        legend_above(figure, panels[0])
        said = "; ".join(
            f"{name}: " + ", ".join(f"{row['value']:.2f}" for row in _places(one, False))
            for name, one in found.items()
        )
        return to_svg(figure, "places", f"Mean saturation rank of ranks 1, 2, ... Through {said}")


def _places(one: Row, filtered: bool) -> list[Row]:
    rows = [row for row in one["places"] if row["filtered"] == filtered]
    return [row for row in rows if finite(row["value"]) is not None]


def _bars(axes: Any, rows: list[Row], shift: float, colour: str, label: str) -> None:
    rows = [row for row in rows if finite(row["value"]) is not None]
    if not rows:
        return
    places = [row["rank"] + shift for row in rows]
    axes.bar(places, [row["value"] for row in rows], 0.25, color=colour, label=label, zorder=2)
    _whiskers(axes, places, rows)


def _whiskers(axes: Any, places: list[float], rows: list[Row]) -> None:
    """95 % intervals where there are any."""
    for place, row in zip(places, rows, strict=True):
        low, high = finite(row.get("low")), finite(row.get("high"))
        if low is not None and high is not None:
            axes.plot([place, place], [low, high], color=INK, linewidth=1.1, zorder=4)


def histogram_figure(study: Study) -> str | None:
    """How many positions settle at each layer, a line of steps per rank."""
    found = study["order"]
    if not found:
        return None
    with drawing():
        ranks = max(one["k"] for one in found.values())
        figure = sheet(10.4 if len(found) > 1 else 6.4, 1.15 * ranks + 1.0)
        grid = figure.subplots(ranks, len(found), squeeze=False, sharex=True)
        for column, (name, one) in enumerate(found.items()):
            for row, histogram in enumerate(one["histogram"]):
                axes = grid[row][column]
                _histogram(axes, histogram, one, COLOURS.get(name, OTHERS[0]))
                if column == 0:
                    axes.set_ylabel(f"rank {histogram['rank']}")
            grid[0][column].set_title(f"Through {NAMES.get(name, name)}")
            grid[-1][column].set_xlabel("saturation layer")
        said = "; ".join(
            f"{name}: " + ", ".join(f"rank {h['rank']} at {_mean(h)}" for h in one["histogram"])
            for name, one in found.items()
        )
        said = f"Mean saturation layers of what settles. Through {said}"
        return to_svg(figure, "histogram", said)


def _mean(histogram: Row) -> str:
    mean = histogram["mean_layer"]
    return "none" if mean is None else f"{mean:.1f}"


def _histogram(axes: Any, histogram: Row, one: Row, colour: str) -> None:
    ticker = report_library("matplotlib.ticker")
    total = max(1, sum(histogram["counts"]))
    shares = [count / total for count in histogram["counts"]]
    last = one["n_layers"]
    axes.bar(range(last), shares[:-1], 0.9, color=colour, zorder=2)
    axes.bar([last], shares[-1:], 0.9, color="#b8c2cc", zorder=2)
    high = max(max(shares[:-1]), 0.02) * 1.25
    axes.set_ylim(0, high)  # the bar of those that never settle may be cut: its share is written
    axes.annotate(
        f"{shares[-1]:.0%} never",
        (0.985, 0.9),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8.5,
        color=SOFT,
    )
    axes.yaxis.set_major_locator(ticker.MaxNLocator(2))
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(7, integer=True))
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def tau_figure(study: Study) -> str | None:
    """Strict tau with its interval, beside what both nulls give; one line per selection."""
    cells = tau_cells(study)
    if not cells:
        return None
    with drawing():
        figure = sheet(9.2, 0.62 * len(cells) + 1.5)
        axes = figure.subplots()
        for place, (_, tau) in enumerate(reversed(cells)):
            _tau_line(axes, place, tau)
        axes.set_yticks(range(len(cells)), [label for label, _ in reversed(cells)])
        axes.axvline(0, color=SOFT, linewidth=0.9, zorder=1)
        axes.set_xlabel("strict Kendall tau (1: always in order; ties count against order)")
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        legend_above(figure, axes)
        said = "; ".join(f"{label}: {tau['value']:+.2f}" for label, tau in cells)
        return to_svg(figure, "tau", f"Strict tau against two nulls. {said}")


def tau_cells(study: Study) -> list[tuple[str, Row]]:
    """Every selection that was tested, with what to call it; the twin's come last."""
    orders = dict(study["order"].items())
    twin = (study.get("twin") or {}).get("order")
    if twin:
        orders["untrained twin, id"] = twin
    return [
        (f"{name}, ranks {tau['ranks'][0]} to {tau['ranks'][1]}"
         + (", filtered" if tau["filtered"] else ""), tau)
        for name, one in orders.items()
        for tau in one["tau"]
        if finite(tau["value"]) is not None
    ]  # fmt: skip


def _tau_line(axes: Any, place: int, tau: Row) -> None:
    null, walk = tau["exchangeable"], tau["walk"]
    if null and null["low"] is not None:
        label = once(axes, "exchangeable ranks (95 %)")
        ends = [null["low"], null["high"]]
        axes.plot(ends, [place] * 2, color="#b8c2cc", linewidth=7, label=label, zorder=2)
    if walk and finite(walk["mean"]) is not None:
        label = once(axes, "random walks (mean)")
        axes.plot([walk["mean"]], [place], "D", color="#e08a1e", label=label, zorder=3)
    ends = [finite(tau["low"]), finite(tau["high"])]
    if None not in ends:
        axes.plot(ends, [place] * 2, color=COLOURS["mat"], linewidth=1.6, zorder=4)
    label = once(axes, "this model (95 %)")
    axes.plot([tau["value"]], [place], "o", color=COLOURS["mat"], label=label, zorder=5)


def intervention_figure(study: Study) -> str | None:
    """Success against the offset from the donor's saturation layer, controls beside it."""
    found = {"this model": study.get("intervention")}
    found["untrained twin"] = (study.get("twin") or {}).get("intervention")
    known = {name: one for name, one in found.items() if one}
    if not known:
        return None
    with drawing():
        figure, panels = _panels(len(known), 4.4)
        for axes, (name, one) in zip(panels, known.items(), strict=True):
            _intervention(axes, one)
            axes.set_title(f"{name}, {one['pairs']} pairs")
        panels[0].set_ylabel("share of pairs that settle at the injection")
        legend_above(figure, panels[0], columns=3)
        said = "; ".join(
            f"{name}: {row['share']:.0%} at offset {row['offset']}"
            for name, one in known.items()
            for row in one["rows"]
            if row["kind"] == "donor"
        )
        return to_svg(figure, "intervention", f"Success of donors by offset. {said}")


def _intervention(axes: Any, one: Row) -> None:
    ticker = report_library("matplotlib.ticker")
    for kind, (colour, marker, label) in KINDS.items():
        rows = sorted((r for r in one["rows"] if r["kind"] == kind), key=lambda r: r["offset"])
        if rows:
            axes.plot(
                [row["offset"] for row in rows],
                [row["share"] for row in rows],
                color=colour, marker=marker, markersize=4.5, label=label, zorder=3,
                linestyle="-" if kind == "donor" else DASHED, clip_on=False,
            )  # fmt: skip
            draw_band(axes, [(r["offset"], r["low"], r["high"]) for r in rows], colour, 0.12)
    axes.axvspan(-1.25, -0.75, color="#eef1f4", zorder=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(11, integer=True))
    axes.set_xlabel("layers after the donor's saturation layer")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    dress_share(axes)
