"""`Evaluation` as HTML: the scores of each map by layer, as a figure and a table."""

import csv
import html
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from layerleap.errors import CannotFetch
from layerleap.files import whole_file, write_json
from layerleap.lens.evaluate import METRICS, Evaluation
from layerleap.maps.kinds import lens_title
from layerleap.show.html.page import notes_html, styled, write_page
from layerleap.study.figures import LENSES, Axis, Figure, Line, short

TITLES = {
    "precision@1": "Precision@1",
    "precision@5": "Precision@5",
    "precision@10": "Precision@10",
    "surprisal": "Surprisal, nats",
    "kl": "KL, nats",
    "r2": "R\u00b2",
}
DRAWN = ("precision@1", "kl", "r2")
LEAD = (
    "Precision@k: how often a map's top token is among the model's top k. Surprisal: -ln of the "
    "probability that the model gives to the map's top token. KL(model || map): how far the whole "
    "distribution is off. R\u00b2: how much of the last state the map predicts. Intervals: 95 %, "
    "over documents. What lies off the scale of a figure is in the table."
)


def evaluation_html(evaluation: Evaluation) -> str:
    """The figure, then a table with a row per layer."""
    notes = notes_html(evaluation.notes())
    try:
        figure = evaluation_figure(evaluation)
    except CannotFetch as error:  # matplotlib belongs to an extra
        figure = f'<p class="legend">No figure: {html.escape(str(error))}</p>'
    head = f'<p class="legend">{html.escape(evaluation.headline())}</p>'
    return styled("evaluation", f"{head}{notes}{figure}{_table(evaluation)}")


def evaluation_figure(evaluation: Evaluation) -> str:
    """The scores by layer as SVG: one panel per metric, one line per map."""
    from layerleap.show.figures.draw import draw

    rows = [
        {
            "x": row["layer"],
            "y": row["value"],
            "low": row["low"],
            "high": row["high"],
            "panel": TITLES[metric],
            "line": row["map"],
            "rows": row["rows"],
            "documents": row["documents"],
        }
        for metric in DRAWN
        for row in evaluation.scores
        if row["metric"] == metric and row["layer"] < evaluation.n_layers
    ]
    title = f"Scores on {evaluation.text}"
    # The logit lens is far off in early layers, and would squash everything else.
    worst = max(row["y"] for row in rows if row["panel"] == TITLES["kl"] and row["line"] != "logit")
    zoom = {TITLES["kl"]: (0.0, 1.25 * worst), TITLES["r2"]: (-0.5, 1.02)}
    lines = {name: LENSES.get(name, Line(short(lens_title(name)))) for name in evaluation.maps}
    figure = Figure(
        "evaluation", title, LEAD, lambda _: rows, y=Axis(), share_y=False, zoom=zoom, lines=lines
    )
    study: Any = SimpleNamespace(model={"n_layers": evaluation.n_layers})
    return draw(figure, study) or ""


def write_evaluation(evaluation: Evaluation, folder: Path) -> Path:
    """Write the page, the figure and the numbers; returns the path of the page."""
    body = evaluation_html(evaluation)
    write_json(folder / "evaluation.json", evaluation.to_dict())
    with (
        whole_file(folder / "evaluation.csv") as temporary,
        temporary.open("w", newline="", encoding="utf8") as stream,
    ):
        table = csv.DictWriter(stream, evaluation.scores[0].keys())
        table.writeheader()
        table.writerows(evaluation.scores)
    if "<svg" in body:
        with whole_file(folder / "evaluation.svg") as temporary:
            temporary.write_text(evaluation_figure(evaluation), encoding="utf8")
    return write_page(
        body,
        folder / "evaluation.html",
        kicker="evaluation",
        title=("How well shortcuts predict", evaluation.model["name"], ""),
        facts=(
            f"{evaluation.n_layers} layers",
            f"{evaluation.n_rows:,} rows",
            f"{evaluation.n_documents:,} documents",
            *map(lens_title, evaluation.maps),
        ),
        text=evaluation.text,
        heading="Scores by layer",
        lead=LEAD,
    )


def _table(evaluation: Evaluation) -> str:
    """A row per layer, a column per metric and map; the best map of a layer is bold."""
    maps = evaluation.maps
    heads = "".join(f'<th colspan="{len(maps)}">{TITLES[metric]}</th>' for metric in METRICS)
    names = "".join(f"<th>{html.escape(short(name, 16))}</th>" for name in maps)
    body = "".join(
        f"<tr><th>{layer}</th>{_cells(evaluation, layer)}</tr>"
        for layer in range(evaluation.n_layers, -1, -1)
    )
    return (
        '<div style="overflow-x:auto"><table><caption>Every score, last layer first. Hover for the '
        "interval; bold where a map is best.</caption>"
        f"<thead><tr><th></th>{heads}</tr><tr><th>layer</th>{names * len(METRICS)}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(evaluation: Evaluation, layer: int) -> str:
    rows = {(row["metric"], row["map"]): row for row in evaluation.at(layer)}
    cells = []
    for metric in METRICS:
        own = [rows[metric, name] for name in evaluation.maps]
        known = [row["value"] for row in own if row["value"] is not None]
        best = (min if metric in ("surprisal", "kl") else max)(known, default=None)
        is_contest = len(set(known)) > 1
        for row in own:
            ends = (row["low"], row["high"])
            title = "" if None in ends else f' title="{ends[0]:.3f} to {ends[1]:.3f}"'
            value = "-" if row["value"] is None else f"{row['value']:.3f}"
            strong = is_contest and row["value"] == best
            cells.append(f"<td{title}>{f'<b>{value}</b>' if strong else value}</td>")
    return "".join(cells)
