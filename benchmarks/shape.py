"""Does the demo show what the paper shows? Reported as measured; nothing is tuned for it.

In: `study.json` of the demo; run if there is none. Out: two rows that count where it holds.
"""

from pathlib import Path
from typing import Any

from common import BUILD, Row, demo_arguments, layerleap

from layerleap.files import read_json


def run(*, smoke: bool) -> list[Row]:
    """Do linear shortcuts agree more than the logit lens at every layer, with no larger error?"""
    study = read_json(_study_file(smoke))
    return [_agreement(study), _train_error(study["tables"]["fits"])]


def _study_file(smoke: bool) -> Path:
    folders = ("bench-smoke-demo",) if smoke else ("demo", "bench-demo")
    for folder in folders:
        if (BUILD / folder / "study.json").is_file():
            return BUILD / folder / "study.json"
    layerleap(*demo_arguments(BUILD / folders[0], smoke))
    return BUILD / folders[0] / "study.json"


def _agreement(study: dict[str, Any]) -> Row:
    text, last = study["settings"]["text"], study["model"]["n_layers"]
    scores = study["tables"]["scores"]
    # The study calls lenses as its paper does: mat is the linear shortcut, id the logit lens.
    value = {
        (row["map"], row["layer"]): row["value"]
        for row in scores
        if row["metric"] == "precision@1" and row["read"] == text and row["fit"] in (text, "-")
    }
    above = [layer for layer in range(last) if value["mat", layer] > value["id", layer]]
    detail = {
        "note": "layers before the last where linear shortcuts agree with the model more often "
        "than the logit lens",
        "samples": {
            name: [value[name, layer] for layer in range(last + 1)] for name in ("mat", "id")
        },
        "not_above": [layer for layer in range(last) if layer not in above],
        "n": next(row["rows"] for row in scores if row["read"] == text),
    }
    return Row("shape_agreement", len(above), last, "layers", at_least=1.0, detail=detail)


def _train_error(fits: list[dict[str, Any]]) -> Row:
    behind = [[f["src"], f["dst"]] for f in fits if f["train_r2"] < f["train_r2_logit"]]
    detail = {
        "note": "maps whose error on the training rows is not above that of the identity",
        "samples": [[f["train_r2"], f["train_r2_logit"]] for f in fits],
        "behind": behind,
        "n": fits[0]["rows"] if fits else 0,
    }
    return Row(
        "shape_train_error", len(fits) - len(behind), len(fits), "maps", at_least=1.0, detail=detail
    )
