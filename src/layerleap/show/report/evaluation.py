"""The report of an evaluation: a page, its figure and the numbers."""

import csv
from pathlib import Path

from layerleap.files import whole_file, write_json
from layerleap.lens.evaluate import Evaluation
from layerleap.maps.kinds import lens_title
from layerleap.results.head import PageHead
from layerleap.results.page import write_page
from layerleap.show.figures.evaluation import LEAD


def write_evaluation(evaluation: Evaluation, folder: Path) -> Path:
    """Write the page, the figure and the numbers; returns the path of the page."""
    figure = evaluation.picture()["figure"]
    write_json(folder / "evaluation.json", evaluation.to_dict())
    with (
        whole_file(folder / "evaluation.csv") as temporary,
        temporary.open("w", newline="", encoding="utf8") as stream,
    ):
        table = csv.DictWriter(stream, evaluation.scores[0].keys())
        table.writeheader()
        table.writerows(evaluation.scores)
    if figure:
        with whole_file(folder / "evaluation.svg") as temporary:
            temporary.write_text(figure, encoding="utf8")
    head = PageHead(
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
    return write_page(folder / "evaluation.html", head, evaluation)
