"""Figures of tasks: what a probe reads off states, and what exiting by it keeps and costs.

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
from layerleap.show.figures.exit_figures import RULES, trails
from layerleap.show.figures.saturation_figures import once
from layerleap.show.figures.select import Row, Study, finite

TASK = ("#4b2e83", "X")  # colour and marker of the rule that this study is about


def confusion_figure(study: Study) -> str | None:
    """Which task the probe names for each true one, as shares of each true task."""
    found = study["probe"]
    if not found:
        return None
    numpy = report_library("numpy")
    with drawing():
        figure = sheet(4.9 * len(found) + 0.4, 4.1)
        grid = figure.subplots(1, len(found), squeeze=False)[0]
        for axes, (name, one) in zip(grid, found.items(), strict=True):
            counts = numpy.array(one["confusion"], dtype=float)
            shares = counts / numpy.maximum(counts.sum(1, keepdims=True), 1)
            axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="none")
            _write_shares(axes, shares, has_more=one["tasks"] < study["settings"]["k"])
            axes.set_title(f"Labels through {NAMES.get(name, name)}")
            axes.set(xlabel="task named by the probe", ylabel="true task")
        said = "; ".join(f"{name}: {one['confusion']}" for name, one in found.items())
        return to_svg(figure, "confusion", f"Counts by true and named task. {said}")


def _write_shares(axes: Any, shares: Any, *, has_more: bool) -> None:
    n = len(shares)
    labels = [*(str(task) for task in range(1, n)), f"{n}+" if has_more else str(n)]
    axes.set_xticks(range(n), labels)
    axes.set_yticks(range(n), labels)
    for row in range(n):
        for column in range(n):
            share = shares[row, column]
            colour = "white" if share > 0.55 else INK
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", color=colour)


def auc_figure(study: Study) -> str | None:
    """ROC-AUC of each task with intervals; exchanged labels and random states beside it."""
    found = study["probe"]
    if not found:
        return None
    with drawing():
        figure = sheet(10.4 if len(found) > 1 else 6.4, 3.9)
        grid = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
        for axes, (name, one) in zip(grid, found.items(), strict=True):
            rows = [row for row in one["rows"] if row["task"] is not None]
            _aucs(axes, rows, COLOURS.get(name, OTHERS[0]))
            axes.set_title(f"Labels through {NAMES.get(name, name)}")
            axes.set_xticks(range(1, len(rows) + 1))
            axes.set_xlabel("task against all others")
        grid[0].set_ylabel("ROC-AUC on unseen documents")
        legend_above(figure, grid[0])
        said = "; ".join(
            f"{name}, task {row['task']}: {row['value']:.2f}"
            for name, one in found.items()
            for row in one["rows"]
            if row["task"] is not None
        )
        return to_svg(figure, "auc", f"ROC-AUC by task. {said}")


def _aucs(axes: Any, rows: list[Row], colour: str) -> None:
    for row in rows:
        task = row["task"]
        axes.plot(
            [task + 0.18] * 2, [row["null_low"], row["null_high"]], color="#b8c2cc", linewidth=7,
            label=once(axes, "exchanged labels (95 %)"), zorder=2,
        )  # fmt: skip
        axes.plot(
            [task - 0.18], [row["control"]], "D", color="#e08a1e", zorder=3,
            label=once(axes, "states that know nothing"),
        )  # fmt: skip
        if finite(row["low"]) is not None and finite(row["high"]) is not None:
            axes.plot([task] * 2, [row["low"], row["high"]], color=colour, linewidth=1.8, zorder=4)
        label = once(axes, "the probe (95 %)")
        axes.plot([task], [row["value"]], "o", color=colour, label=label, zorder=5)
    axes.axhline(0.5, color=SOFT, linewidth=0.9, linestyle=DASHED, zorder=1)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def task_exit_figure(study: Study) -> str | None:
    """Agreement and accuracy against mean layers run; rows of panels, a column per lens."""
    return _exit_panels(study, "layers", "mean layers run per token", "exits")


def task_flops_figure(study: Study) -> str | None:
    """The same against FLOPs relative to the full model."""
    return _exit_panels(study, "flops", "FLOPs, relative to the full model", "flops")


def _exit_panels(study: Study, key: str, label: str, name: str) -> str | None:
    found = _trails(study)
    if not found:
        return None
    measures = [("agreement", "agreement with the full model")]
    if any(finite(r.get("accuracy")) is not None for t in found.values() for r in t["oracle"]):
        measures.append(("accuracy", "right answers"))
    with drawing():
        figure = sheet(10.4, 3.7 * len(measures) + 0.8)
        grid = figure.subplots(len(measures), len(found), squeeze=False, sharex=key == "layers")
        for column, (lens, rules) in enumerate(found.items()):
            for row, (measure, words) in enumerate(measures):
                axes = grid[row][column]
                for rule, rows in rules.items():
                    _draw(axes, rule, rows, key, measure)
                _dress(axes, study, key, measure)
                if column == 0:
                    axes.set_ylabel(words)
            grid[0][column].set_title(f"Through {NAMES.get(lens, lens)}")
            grid[-1][column].set_xlabel(label)
        legend_above(figure, grid[0][0], columns=4)
        return to_svg(figure, name, _in_words(found, key))


def _trails(study: Study) -> dict[str, dict[str, list[Row]]]:
    found: dict[str, dict[str, list[Row]]] = {}
    for (lens, rule), rows in trails(study).items():
        found.setdefault(lens, {})[rule] = rows
    return {lens: found[lens] for lens in ("id", "mat") if "oracle" in found.get(lens, {})}


def _draw(axes: Any, rule: str, rows: list[Row], key: str, measure: str) -> None:
    rows = [row for row in rows if finite(row.get(measure)) is not None]
    places = [row[key] for row in rows], [row[measure] for row in rows]
    if rule == "oracle":
        style = {"markersize": 13, "markeredgecolor": INK, "markeredgewidth": 0.7, "zorder": 5}
        axes.plot(*places, "*", color="#f0e442", label="oracle", clip_on=False, **style)
        return
    if rule == "fixed":
        axes.plot(*places, color=SOFT, linestyle=DASHED, linewidth=1.1, label="fixed layer")
        return
    colour, marker = TASK if rule == "task" else RULES.get(rule, (OTHERS[0], "o"))
    width = 2.4 if rule == "task" else 1.5
    axes.plot(
        *places, color=colour, marker=marker, markersize=3.4, linewidth=width, label=rule, zorder=3
    )
    ends = ("low", "high") if measure == "agreement" else ("accuracy_low", "accuracy_high")
    band = [(row[key], finite(row.get(ends[0])), finite(row.get(ends[1]))) for row in rows]
    draw_band(axes, band, colour, alpha=0.08)


def _dress(axes: Any, study: Study, key: str, measure: str) -> None:
    ticker = report_library("matplotlib.ticker")
    if key == "flops":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}\u00d7"))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.axvline(1, color=INK, linewidth=1.2, zorder=1)
    else:
        axes.set_xlim(0, study["model"]["n_layers"] * 1.01)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.grid(color=GRID, linewidth=0.8)
    if measure == "agreement":
        dress_share(axes)
        return
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    full = finite(study["exits"]["full"]["accuracy"])
    if full is not None:
        axes.axhline(full, color=INK, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)


def _in_words(found: dict[str, dict[str, list[Row]]], key: str) -> str:
    parts = []
    for lens, rules in found.items():
        for rule, rows in rules.items():
            good = [row for row in rows if row["agreement"] >= 0.95]
            if good:
                best = min(good, key=lambda row: row[key])
                parts.append(f"{rule} through {lens}: {best[key]:.2f} at {best['agreement']:.0%}")
    return f"Fewest {key} with 95 % agreement or more. " + "; ".join(parts)
