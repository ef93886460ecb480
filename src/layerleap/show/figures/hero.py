"""The wide picture for the top of a page: what the study found, at one glance.

In: the plain-data result of a study. Out: the same picture as SVG text and as PNG bytes.
"""

from typing import Any, NamedTuple

from layerleap.show.figures.canvas import (
    INK,
    NAMES,
    SOFT,
    colour_of,
    draw_curve,
    draw_r2,
    drawing,
    dress_layers,
    dress_share,
    sheet,
    to_png,
    to_svg,
)
from layerleap.show.figures.select import (
    Curve,
    Study,
    has_interval,
    home,
    home_curves,
    home_rows,
    r2_cells,
    sample,
)

SHOWN = ("mat", "id")  # one comparison: more curves would need more words


class Hero(NamedTuple):
    """One picture in two formats."""

    svg: str
    png: bytes


def hero(study: Study) -> Hero | None:
    """Agreement of mat and id per layer beside the R2 of mat, under the finding as its title."""
    curves = {each.map: each for each in home_curves(study, "precision@1") if each.map in SHOWN}
    if not curves:
        return None
    n_layers, cells = study["model"]["n_layers"], r2_cells(study, "mat")
    with drawing():
        figure = sheet(12, 5.2)
        ratios = [1.75, 1] if cells else [1]
        panels = figure.subplots(1, len(ratios), width_ratios=ratios, squeeze=False)[0]
        figure.get_layout_engine().set(rect=(0.012, 0.06, 0.976, 0.76), wspace=0.07)
        _agreement_panel(panels[0], curves, n_layers, study["summary"]["half"])
        if cells:
            _r2_panel(figure, panels[1], cells, n_layers)
        title = hero_title(study)
        figure.text(0.018, 0.965, title, fontsize=16.5, weight="bold", va="top", linespacing=1.25)
        facts = _facts(study)
        figure.text(0.985, 0.015, facts, fontsize=8.5, color=SOFT, va="bottom", ha="right")
        label = f"{title.replace(chr(10), ' ')} {facts}."
        return Hero(to_svg(figure, "hero", label), to_png(figure))


def _facts(study: Study) -> str:
    rows, (_, read) = [row for row in home_rows(study) if row["map"] in SHOWN], home(study)
    name, n_layers = _short(study["model"]["name"]), study["model"]["n_layers"]
    band = "band = 95 % interval" if has_interval(rows) else "no interval"
    return f"{name}, {n_layers} layers, read on {_short(read)}; {sample(rows)}; {band}"


def _short(name: str) -> str:
    return name if len(name) <= 40 else name[:39] + "\u2026"


def hero_title(study: Study) -> str:
    """The finding in one sentence over two lines, with the study's own numbers."""
    model, middle = study["model"], study["model"]["n_layers"] // 2
    curves = {each.map: each for each in home_curves(study, "precision@1")}
    shares = {name: point.value for name, each in curves.items() if (point := each.at(middle))}
    name = _short(model["name"])
    token = "masked token" if model["kind"] == "masked-token" else "next token"
    if "mat" not in shares:
        return f"What {name} is about to say,\nread after each of its {model['n_layers']} layers"
    after = f"After {middle} of {model['n_layers']} layers"
    text = f"{after}, a linear shortcut names {name}'s own {token}\n{_percent(shares['mat'])}"
    if "id" not in shares:
        return f"{text} of the time"
    return f"{text} of the time; the logit lens does so {_percent(shares['id'])} of the time"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def _agreement_panel(
    axes: Any, curves: dict[str, Curve], n_layers: int, half: dict[str, int | None]
) -> None:
    for index, (name, each) in enumerate(curves.items()):
        draw_curve(axes, each, NAMES.get(name, name), colour_of(name, index))
    dress_layers(axes, n_layers, "layer the state is taken from")
    dress_share(axes)
    axes.set_title("Agreement with the full model's answer")
    axes.legend(loc="upper left", fontsize=10)
    if "mat" in curves and "id" in curves:
        _mark_lead(axes, half["mat"], half["id"], n_layers)


def _mark_lead(axes: Any, early: int | None, late: int | None, n_layers: int) -> None:
    """An arrow at one half of agreement, from where id gets there back to where mat does."""
    if early is None or late is None or late - early < max(2, n_layers / 10):
        return  # never reached, or too short to draw
    style = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (early, 0.5), (late, 0.5), arrowprops=style, zorder=4)
    # Above the curve and left of the arrow: before it reaches one half, nothing is drawn there.
    place = {"ha": "right", "va": "bottom", "fontsize": 9.5}
    axes.text(early - 0.02 * n_layers, 0.52, f"half, {late - early} layers earlier", **place)


def _r2_panel(figure: Any, axes: Any, cells: dict[tuple[int, int], float], n_layers: int) -> None:
    mesh = draw_r2(axes, cells, n_layers)
    axes.set_title("How well mat predicts later layers (R\u00b2)")
    bar = figure.colorbar(mesh, ax=axes, shrink=0.8, aspect=22, pad=0.03)
    bar.outline.set_visible(False)
