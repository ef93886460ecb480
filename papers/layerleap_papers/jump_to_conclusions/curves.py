"""Curves of the readings: which rows of the tables, and how they become points of a figure."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from layerleap import StudyResult
from layerleap.lens import ANY, Bounds, Scores, lasting, mean_interval, score_table
from layerleap.study import LENSES as LOOKS, Mark, Row, pick

PRECISIONS = ("precision@1", "precision@5", "precision@10")
METRICS = (*PRECISIONS, "surprisal", "kl")
MAPS = ("mat", "tuned", "id")  # in the order of figures and tables
LENS_OF = {"-": "id", "tuned": "tuned"}  # by label of the fit; all other fits are mat
IN_PERCENT = ("{:.1f}", 100.0)
PAPER_WORDS = {"logit": "id", "linear": "mat"}  # what the paper calls lenses, as do its tables
LENSES = {
    "mat": replace(LOOKS["linear"], label="mat (linear shortcut)"),
    "tuned": replace(LOOKS["tuned"], label="tuned (tuned lens)"),
    "id": replace(LOOKS["logit"], label="id (logit lens)"),
}


def in_paper_words(rows: Iterable[Row]) -> list[Row]:
    """The rows with lenses called as in the paper."""
    return [{**row, "map": PAPER_WORDS.get(row["map"], row["map"])} for row in rows]


def estimates(documents: Tensor, values: Tensor, bounds: Bounds = ANY) -> list[Row]:
    """Column means of (row, column) with 95 % intervals over documents."""
    return [estimate.to_dict() for estimate in mean_interval(values, documents, bounds)]


def score_rows(scores: Scores, read: str, labels: Iterable[str]) -> list[Row]:
    """One row per label, metric and layer; `fit` says what a lens was fitted on."""
    columns = {
        name: {label: getattr(scores, name)[label] for label in labels}
        for name in ("rank", "surprisal", "kl")
    }
    return [
        {"fit": row["map"], "read": read, **row, "map": LENS_OF.get(row["map"], "mat")}
        for row in score_table(scores.documents, columns, {})
    ]


def main_text(result: StudyResult) -> str:
    """The text that figures are about."""
    return str(result.settings["text"])


# Readings of the main text through mat (fitted on it), tuned and id.
MAIN: dict[str, Any] = {"read": main_text, "fit": lambda result: {main_text(result), "tuned", "-"}}


def curve(result: StudyResult, lens: str, metric: str) -> list[Row]:
    """The rows of one lens on the main text, from layer 0 to the last."""
    return pick("scores", "tuned_scores", map=lens, metric=metric, **MAIN)(result)


def values(rows: Iterable[Row]) -> list[float]:
    """The values of a curve."""
    return [row["value"] for row in rows]


def both(result: StudyResult, metric: str) -> tuple[list[float], list[float]]:
    """The values of mat and of id on the main text, from layer 0 to the last."""
    return values(curve(result, "mat", metric)), values(curve(result, "id", metric))


def below_last(result: StudyResult, rows: Iterable[Row]) -> list[Row]:
    """The rows of layers below the last, where there is something to predict."""
    return [row for row in rows if row["layer"] < result.model["n_layers"]]


def half_layers(result: StudyResult) -> dict[str, int | None]:
    """By lens, the layer from which on it agrees with the model at least half of the time."""
    mat, plain = both(result, "precision@1")
    return {"mat": lasting(mat, 0.5), "id": lasting(plain, 0.5)}


def point(row: Row, **more: Any) -> Row:
    """A point of a figure with its interval and sample; over layers, a line per map, by default."""
    sample = {key: row[key] for key in ("low", "high", "rows", "documents")}
    named = {"x": row.get("layer"), "y": row.get("value"), "line": row.get("map", "")}
    return {**named, **sample, **more}


def floor(result: StudyResult) -> Iterator[Mark]:
    """The lowest possible surprisal: that of the model's own top token."""
    for row in curve(result, "mat", "surprisal")[-1:]:
        if row["value"] is not None:
            yield Mark("y", row["value"], f"the model's own top token, {row['value']:.2f}")


def is_masked(result: StudyResult) -> bool:
    """Whether the model predicts masked tokens."""
    return bool(result.model["kind"] == "masked-token")


def token_of(result: StudyResult) -> str:
    """What the model predicts."""
    names = {"next-token": "next token", "masked-token": "masked token"}
    return names.get(result.model["kind"], "class")
