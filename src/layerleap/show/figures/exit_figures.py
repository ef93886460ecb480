"""Figures of early exits: what each rule keeps of the model's answers, and what it costs.

In: the plain-data result of a study. Out: SVG text, or None when the study has nothing for it.
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
    colour_of,
    draw_band,
    drawing,
    dress_share,
    legend_above,
    sheet,
    to_svg,
)
from layerleap.show.figures.select import Row, Study, finite

TARGETS = (0.9, 0.95, 0.98, 0.99)
PAPER = "gap"  # the rule of the paper
# By rule: colour and marker; both, so that neither has to be told apart alone.
RULES = {
    "gap": (COLOURS["mat"], "o"),
    "top probability": ("#56b4e9", "v"),
    "entropy": ("#8a6d00", "^"),
    "similarity": ("#cc79a7", "s"),
    "patience": ("#009e73", "D"),
    "learned": ("#d55e00", "P"),
}
ALONE = ("fixed", "oracle")  # not rules one would use: what rules are compared with

Trails = dict[tuple[str, str], list[Row]]


def trails(study: Study) -> Trails:
    """The settings of each rule through each map, in the order of the knob."""
    found: Trails = {}
    rows = (study.get("exits") or {}).get("curves") or []
    for name in dict.fromkeys(["mat", "tuned", "id", *(row["map"] for row in rows)]):
        for row in rows:
            known = all(finite(row.get(key)) is not None for key in ("layers", "agreement"))
            if row["map"] == name and known:
                found.setdefault((name, row["rule"]), []).append(row)
    for group in found.values():
        group.sort(key=lambda row: finite(row.get("knob")) or 0.0)
    return found


def exit_figure(study: Study) -> str | None:
    """Agreement against mean layers by the paper's rule, one colour per map; and its top end."""
    found = {key: rows for key, rows in trails(study).items() if key[1] in (PAPER, *ALONE)}
    if not any(rule == PAPER for _, rule in found):
        return None
    n_layers = study["model"]["n_layers"]
    with drawing():
        figure = sheet(10.4, 4.5)
        whole, top = figure.subplots(1, 2, width_ratios=[1.25, 1])
        for axes in (whole, top):
            for index, ((name, rule), rows) in enumerate(found.items()):
                _draw_map_trail(axes, rows, name, rule, index)
            _dress_exit(axes, n_layers)
        whole.set_title("All settings")
        whole.set_ylabel("agreement with the full model")
        _zoom(top, [row for rows in found.values() for row in rows])
        legend_above(figure, whole, columns=3)
        return to_svg(figure, "exit", _in_words(found, "layers", "mean layers"))


def _draw_map_trail(axes: Any, rows: list[Row], name: str, rule: str, index: int) -> None:
    colour, shown = colour_of(name, index), name
    if rule == "oracle":
        _draw_star(axes, rows, "layers", colour, f"{shown}, oracle")
    elif rule == "fixed":
        _draw_trail(axes, rows, "layers", colour, None, f"{shown}, fixed layer")
    else:
        label = f"{NAMES.get(name, name)}, {rule} rule"
        _draw_trail(axes, rows, "layers", colour, "o", label)
        draw_band(axes, _ends(rows, "layers"), colour, alpha=0.18)


def _ends(rows: list[Row], key: str) -> list[tuple[float, float | None, float | None]]:
    return [(row[key], finite(row.get("low")), finite(row.get("high"))) for row in rows]


def _draw_trail(
    axes: Any, rows: list[Row], key: str, colour: str, marker: str | None, label: str
) -> None:
    """A rule's settings joined by a line; without a marker it is a fixed exit, dashed and thin."""
    few = len(rows) <= 60
    style = {
        "linewidth": 1.7 if marker else 1.1,
        "linestyle": "-" if marker else DASHED,
        "marker": marker if few else None,
        "markersize": 3.2,
        "zorder": 3 if marker else 2,
    }
    places = [row[key] for row in rows], [row["agreement"] for row in rows]
    axes.plot(*places, color=colour, label=label, **style)


def _draw_star(axes: Any, rows: list[Row], key: str, colour: str, label: str) -> None:
    places = [row[key] for row in rows], [row["agreement"] for row in rows]
    style = {"markersize": 13, "markeredgecolor": INK, "markeredgewidth": 0.7, "zorder": 5}
    # Drawn over the edge of the panel: an oracle agrees always, which is the very top.
    axes.plot(*places, "*", color=colour, label=label, clip_on=False, **style)


def _dress_exit(axes: Any, n_layers: int) -> None:
    ticker = report_library("matplotlib.ticker")
    axes.set_xlim(0, n_layers * 1.01)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    axes.set_xlabel("mean layers run per token")
    axes.grid(color=GRID, linewidth=0.8)
    dress_share(axes)


def _zoom(axes: Any, rows: list[Row]) -> None:
    """The part that matters in use: agreement of 85 % and more, with the targets marked."""
    ticker = report_library("matplotlib.ticker")
    axes.set_title("Above 85 %")
    axes.set_ylim(0.85, 1.0)
    axes.yaxis.set_major_locator(ticker.FixedLocator(TARGETS))
    reached = [row["layers"] for row in rows if row["agreement"] >= 0.85]  # stars included
    if reached:
        right = axes.get_xlim()[1]
        axes.set_xlim(min(max(min(reached) - 1, 0), right - 2), right)


def exit_rule_figure(study: Study) -> str | None:
    """Agreement against mean layers for all rules, one row of panels per fitted map."""
    panels = _rule_panels(study)
    if not panels:
        return None
    with drawing():
        figure = sheet(10.4, 4.0 * len(panels) + 0.7)
        grid = figure.subplots(len(panels), 2, squeeze=False)
        figure.get_layout_engine().set(hspace=0.06)
        for (whole, top), (name, found) in zip(grid, panels.items(), strict=True):
            for axes in (whole, top):
                _draw_rules(axes, found, "layers")
                _dress_exit(axes, study["model"]["n_layers"])
            whole.set_title(f"Through {NAMES.get(name, name)}")
            whole.set_ylabel("agreement with the full model")
            _zoom(top, [row for rows in found.values() for row in rows])
        legend_above(figure, grid[0][0], columns=4)
        drawn = {(name, rule): rows for name in panels for rule, rows in panels[name].items()}
        return to_svg(figure, "exit_rules", _in_words(drawn, "layers", "mean layers"))


def _rule_panels(study: Study) -> dict[str, dict[str, list[Row]]]:
    """Maps that were tried with more than the paper's rule; id only if there is no other."""
    found: dict[str, dict[str, list[Row]]] = {}
    for (name, rule), rows in trails(study).items():
        found.setdefault(name, {})[rule] = rows
    rich = {name: rules for name, rules in found.items() if set(rules) - {PAPER, *ALONE}} or found
    return {name: rules for name, rules in rich.items() if name != "id"} or rich


def _draw_rules(axes: Any, found: dict[str, list[Row]], key: str) -> None:
    others = [rule for rule in found if rule not in RULES and rule not in ALONE]
    for index, rule in enumerate([*RULES, *others, *ALONE]):
        rows = [row for row in found.get(rule, []) if finite(row.get(key)) is not None]
        if not rows:
            continue
        if rule == "oracle":
            _draw_star(axes, rows, key, "#f0e442", "oracle")
        elif rule == "fixed":
            _draw_trail(axes, rows, key, SOFT, None, "fixed layer")
        else:
            colour, marker = RULES.get(rule, (OTHERS[index % len(OTHERS)], "o"))
            label = f"{rule} (the paper's)" if rule == PAPER else rule
            _draw_trail(axes, rows, key, colour, marker, label)
            draw_band(axes, _ends(rows, key), colour, alpha=0.08)


def exit_flops_figure(study: Study) -> str | None:
    """Agreement against FLOPs relative to the full model; right of 1 exiting costs more."""
    panels = {
        name: found
        for name, rules in _rule_panels(study).items()
        if (found := {rule: known for rule, rows in rules.items() if (known := _priced(rows))})
    }
    if not panels:
        return None
    with drawing():
        figure = sheet(5.0 * len(panels) + (0.4 if len(panels) > 1 else 2.6), 4.7)
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True, sharex=True)[0]
        for axes, (name, found) in zip(grid, panels.items(), strict=True):
            _draw_rules(axes, found, "flops")
            axes.set_title(f"read through {NAMES.get(name, name)}")
        for axes in grid:
            _dress_flops(axes)
        grid[0].set_ylabel("agreement with the full model")
        legend_above(figure, grid[0], columns=4)
        drawn = {(name, rule): rows for name in panels for rule, rows in panels[name].items()}
        return to_svg(figure, "exit_flops", _in_words(drawn, "flops", "of the full model's FLOPs"))


def _priced(rows: list[Row]) -> list[Row]:
    return [row for row in rows if (finite(row.get("flops")) or 0) > 0]


def _dress_flops(axes: Any) -> None:
    """A doubling per step: rules that ask the head often cost several times the model."""
    ticker = report_library("matplotlib.ticker")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}\u00d7"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    left, right = axes.get_xlim()
    right = max(right, 1.6)
    axes.set_xlim(left, right)
    axes.axvspan(1, right, color="#f4e3d7", alpha=0.55, linewidth=0, zorder=0)
    axes.axvline(1, color=INK, linewidth=1.2, zorder=1)
    place = {
        "fontsize": 8.5,
        "color": SOFT,
        "va": "bottom",
        "transform": axes.get_xaxis_transform(),
    }
    axes.text(1.04, 0.02, "dearer than\nnot exiting", **place)
    axes.set_xlabel("FLOPs, relative to the full model")
    axes.grid(color=GRID, linewidth=0.8)
    dress_share(axes)


def _in_words(found: Trails, key: str, unit: str) -> str:
    parts = []
    for (name, rule), rows in found.items():
        best = max(rows, key=lambda row: (row["agreement"], -row[key]))
        parts.append(
            f"{rule} through {name}: {best['agreement']:.0%} agreement at {best[key]:.2f} {unit}"
        )
    return "Agreement of early exits with the full model, best setting each. " + "; ".join(parts)
