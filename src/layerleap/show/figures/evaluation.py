"""The scores of an evaluation by layer: one panel per metric, one line per map."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from layerleap.maps.kinds import lens_title
from layerleap.show.figures.draw import draw
from layerleap.study.figures import LENSES, Axis, Figure, Line, short

if TYPE_CHECKING:
    from layerleap.lens.evaluate import Evaluation

TITLES = {"precision@1": "Precision@1", "kl": "KL, nats", "r2": "R\u00b2"}
LEAD = (
    "Precision@k: how often a map's top token is among the model's top k. Surprisal: -ln of the "
    "probability that the model gives to the map's top token. KL(model || map): how far the whole "
    "distribution is off. R\u00b2: how much of the last state the map predicts. Intervals: 95 %, "
    "over documents. What lies off the scale of a figure is in the table."
)


def evaluation_figure(evaluation: "Evaluation") -> str:
    """The scores by layer as SVG: one panel per metric, one line per map."""
    keys = {"x": "layer", "y": "value", "line": "map"}
    rows = [
        {**row, **{key: row[name] for key, name in keys.items()}, "panel": title}
        for metric, title in TITLES.items()
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
