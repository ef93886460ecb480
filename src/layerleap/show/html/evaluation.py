"""`Evaluation` as HTML: the scores of each map by layer, as a figure and a table."""

from types import SimpleNamespace
from typing import Any

from layerleap.read.evaluate import Evaluation
from layerleap.show.figures.draw import draw
from layerleap.study.figures import Axis, Figure

TITLES = {
    "precision@1": "Precision@1", "precision@5": "Precision@5", "precision@10": "Precision@10",
    "surprisal": "Surprisal (nats)", "kl": "KL (nats)", "r2": "R\u00b2",
}  # fmt: skip
LEAD = (
    "Precision@k: how often the map's top token is among the model's top k. Surprisal: -ln of the "
    "probability that the model gives to the map's top token. KL(model || map): how far the whole "
    "distribution is off. R\u00b2: how much of the last state is predicted. Intervals: 95 %, bootstrap "
    "over documents. Click nothing: all numbers are in evaluation.csv and evaluation.json."
)


def figure_of(evaluation: Evaluation) -> str | None:
    """The scores by layer as SVG: one panel per metric, one line per map."""
    shown = ("precision@1", "kl", "r2")

    def rows(_: Any) -> list[dict[str, Any]]:
        return [
            {
                "x": row["layer"], "y": row["value"], "low": row["low"], "high": row["high"],
                "panel": TITLES[row["metric"]], "line": row["map"], "rows": row["rows"],
                "documents": row["documents"],
            }
            for metric in shown
            for row in evaluation.scores
            if row["metric"] == metric and row["layer"] < evaluation.n_layers
        ]  # fmt: skip

    title = f"Scores on {evaluation.text}"
    figure = Figure("evaluation", title, "", rows, y=Axis(""), share_y=False)
    study: Any = SimpleNamespace(model={"n_layers": evaluation.n_layers})
    return draw(figure, study)
