"""The figures of a study of shortcuts, one function each.

In: the plain-data result of a study. Out: SVG text, or None when the study has nothing for it.
The picture for the top of a page, `hero`, has its own file and is offered here too.
"""

from typing import Any

from layerleap.show.figures.canvas import (
    INK,
    NAMES,
    OTHERS,
    SOFT,
    colour_of,
    draw_curve,
    draw_floor,
    draw_maps,
    draw_r2,
    drawing,
    dress_layers,
    dress_powers,
    dress_share,
    legend_above,
    sheet,
    to_svg,
)
from layerleap.show.figures.hero import Hero, hero
from layerleap.show.figures.select import (
    PRECISIONS,
    Curve,
    Study,
    final_fits,
    finite,
    home_curves,
    r2_cells,
    transfers,
)
from layerleap.show.figures.words import curves_in_words, fit_label, short

__all__ = [
    "Hero",
    "condition_plot",
    "hero",
    "kl_curves",
    "precision_curves",
    "r2_heatmaps",
    "surprisal_curves",
    "transfer_curves",
]


def r2_heatmaps(study: Study) -> str | None:
    """R2 of mat beside id for all pairs of layers, on one colour scale from 0 to 1."""
    maps = {name: cells for name in ("mat", "id") if (cells := r2_cells(study, name))}
    if not maps:
        return None
    n_layers = study["model"]["n_layers"]
    with drawing():
        figure = sheet(4.4 * len(maps) + 0.8, 4.6, layout="compressed")
        panels = figure.subplots(1, len(maps), squeeze=False)[0]
        for axes, (name, cells) in zip(panels, maps.items(), strict=True):
            mesh = draw_r2(axes, cells, n_layers)
            axes.set_title(NAMES[name])
            _note_below_zero(axes, cells)
        bar = figure.colorbar(mesh, ax=list(panels), shrink=0.82, pad=0.02, aspect=24)
        bar.set_label("R\u00b2 (below 0 shown as 0)")
        bar.outline.set_visible(False)
        return to_svg(figure, "r2", _r2_in_words(maps))


def _note_below_zero(axes: Any, cells: dict[tuple[int, int], float]) -> None:
    """In the empty half of the triangle: how many pairs the colour scale cuts off."""
    below = sum(value < 0 for value in cells.values())
    text = f"{below:,} of {len(cells):,} pairs\nbelow 0, shown as 0" if below else ""
    axes.text(0.97, 0.05, text, transform=axes.transAxes, ha="right", color=SOFT, fontsize=8.5)


def _r2_in_words(maps: dict[str, dict[tuple[int, int], float]]) -> str:
    parts = [
        f"{NAMES[name]}: from {min(cells.values()):.2f} to {max(cells.values()):.2f}, "
        f"{sum(value < 0 for value in cells.values())} of {len(cells)} pairs below 0"
        for name, cells in maps.items()
    ]
    return "Heat maps of R squared for every pair of layers. " + "; ".join(parts) + "."


def precision_curves(study: Study) -> str | None:
    """Precision@1, @5 and @10 per layer, one panel each, every map with its 95 % band."""
    panels = [(metric, curves) for metric in PRECISIONS if (curves := home_curves(study, metric))]
    if not panels:
        return None
    with drawing():
        figure = sheet(3.35 * len(panels) + 0.4, 3.7)
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (metric, curves) in zip(grid, panels, strict=True):
            draw_maps(axes, curves)
            dress_layers(axes, study["model"]["n_layers"])
            dress_share(axes)
            axes.set_title(metric.capitalize())
        grid[0].set_ylabel("share of states")
        legend_above(figure, grid[0])
        return to_svg(figure, "precision", curves_in_words("Precision at 1", panels[0][1], "%"))


def surprisal_curves(study: Study) -> str | None:
    """Surprisal per layer in nats; the floor is the model's own top token at the last layer."""
    curves = home_curves(study, "surprisal")
    if not curves:
        return None
    n_layers = study["model"]["n_layers"]
    floors = [point.value for each in curves if (point := each.at(n_layers))]
    with drawing():
        figure, axes = _one_panel(study, curves, "surprisal (nats)")
        if floors:
            draw_floor(axes, floors[0])
        return to_svg(figure, "surprisal", curves_in_words("Surprisal", curves, "nats"))


def kl_curves(study: Study) -> str | None:
    """Kullback-Leibler divergence of the reading from the model per layer, in nats."""
    curves = home_curves(study, "kl")
    if not curves:
        return None
    with drawing():
        figure, _ = _one_panel(study, curves, "KL divergence (nats)")
        return to_svg(figure, "kl", curves_in_words("KL divergence", curves, "nats"))


def transfer_curves(study: Study) -> str | None:
    """Agreement per layer on each text, with maps fitted on it and on the other texts."""
    found = transfers(study)
    if not found:
        return None
    columns = min(len(found), 3)
    rows = -(-len(found) // columns)
    fits = list(dict.fromkeys(each.fit for curves in found.values() for each in curves))
    with drawing():
        figure = sheet(4.6 * columns + 0.4, 3.6 * rows + 0.2)
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        for axes in grid[len(found) :]:
            axes.set_visible(False)
        for axes, (read, curves) in zip(grid, found.items(), strict=False):
            for each in curves:
                colour = colour_of(each.map) if each.map == "id" else _fit_colour(fits, each.fit)
                draw_curve(axes, each, fit_label(each), colour)
            dress_layers(axes, study["model"]["n_layers"])
            dress_share(axes)
            axes.set_title(f"read on {short(read)}")
        grid[0].set_ylabel("agreement")
        legend_above(figure, grid[0])
        words = " ".join(
            curves_in_words(f"Agreement on {read}", curves, "%") for read, curves in found.items()
        )
        return to_svg(figure, "transfer", words)


def condition_plot(study: Study) -> str | None:
    """Condition number of the fit from each layer to the last one, on a log scale."""
    fits = [row for row in final_fits(study) if (finite(row.get("condition")) or 0) > 0]
    if not fits:
        return None
    short = [row for row in fits if (row.get("rank") or 0) < (row.get("width") or 0)]
    with drawing():
        figure = sheet(7.2, 3.3)
        axes = figure.subplots()
        layers, values = [row["src"] for row in fits], [row["condition"] for row in fits]
        axes.plot(layers, values, color=INK, linewidth=1.6, marker="o", markersize=3.8)
        if short:
            spots = [row["src"] for row in short], [row["condition"] for row in short]
            style = {"color": colour_of("id"), "markersize": 9, "markeredgewidth": 1.5}
            axes.plot(*spots, "o", fillstyle="none", label="rank below the width", **style)
            axes.legend(loc="best")
        dress_powers(axes)
        dress_layers(axes, max(study["model"]["n_layers"] - 1, 1), "from layer (to the last)")
        axes.set_ylabel("condition number")
        words = (
            f"Condition number of {len(fits)} fits to the last layer, "
            f"from {min(values):.1e} to {max(values):.1e}; {len(short)} below full rank."
        )
        return to_svg(figure, "condition", words)


def _one_panel(study: Study, curves: list[Curve], label: str) -> tuple[Any, Any]:
    figure = sheet(5.2, 3.6)
    axes = figure.subplots()
    draw_maps(axes, curves)
    dress_layers(axes, study["model"]["n_layers"])
    axes.set_ylim(bottom=0)
    axes.set_ylabel(label)
    legend_above(figure, axes, columns=2)  # the sheet is narrow
    return figure, axes


def _fit_colour(fits: list[str], fit: str) -> str:
    """Blue for the first text, then the other colours: a text keeps its colour in all panels."""
    index = [name for name in fits if name != "-"].index(fit)
    return colour_of("mat") if index == 0 else OTHERS[(index - 1) % len(OTHERS)]
