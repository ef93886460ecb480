"""The tables of a study as CSV files.

In: the plain-data result of a study. Out: the text of each file by name, every row of it; parts
that the study does not have make no file.
"""

import csv
import io

from layerleap.show.figures.select import Row, Study

# Columns that come first when present; whatever else the study has follows.
SAMPLE = ("rows", "documents")
VALUE = ("value", "low", "high", *SAMPLE)
COLUMNS = {
    "r2": ("map", "src", "dst", "r2", "low", "high", "weighted", "no_first", *SAMPLE),
    "scores": ("fit", "read", "map", "layer", "metric", *VALUE),
    "fits": ("src", "dst", "rows", "rank", "width", "condition", "ridge", "train_r2",
             "train_r2_id"),
    "claims": ("claim", "agrees", "seen", "why"),
    "parts": ("map", "bias", "layer", "metric", *VALUE),
    "schedules": ("schedule", "kind", "blocks", "metric", *VALUE),
    "exits": ("map", "rule", "knob", "layers", "flops", "agreement", "low", "high", *SAMPLE),
    "exits_saved": ("map", "rule", "target", "saved", "low", "high", "share", "flops",
                    "interpolated", *SAMPLE),
    "calibrated": ("map", "rule", "method", "knob", "calibrated_on", "text", "promised",
                   "disagreement", "low", "high", "layers", "saved", "flops", "holds", *SAMPLE,
                   "note"),
    "tuned": ("layer", "start", "rows_needed", "seconds_needed", "kl_closed", "kl_tuned",
              "agreement_closed", "agreement_tuned"),
    "tuned_progress": ("layer", "start", "rows_seen", "seconds", "kl", "agreement"),
    "sizes": ("model", "n_layers", "d_model", "parameters", "map", "layer", "metric", *VALUE),
}  # fmt: skip
ALWAYS = ("r2", "scores", "fits")


def csv_files(study: Study) -> dict[str, str]:
    """The text of every CSV file of the study, by file name."""
    found = {name: study[name] for name in ALWAYS} | optional_rows(study)
    return {
        f"{name}.csv": csv_text(found[name], columns)
        for name, columns in COLUMNS.items()
        if name in ALWAYS or found[name]
    }


def optional_rows(study: Study) -> dict[str, list[Row]]:
    """The rows of each optional part; none where the study does not have it."""
    exits, tuned = study.get("exits") or {}, study.get("tuned") or {}
    return {
        "claims": study.get("claims") or [],
        "parts": (study.get("parts") or {}).get("scores") or [],
        "schedules": study.get("schedules") or [],
        "exits": exits.get("curves") or [],
        "exits_saved": exits.get("saved") or [],
        "calibrated": calibrated_rows(study),
        "tuned": tuned.get("summary") or [],
        "tuned_progress": tuned.get("progress") or [],
        "sizes": study.get("sizes") or [],
    }


def calibrated_rows(study: Study) -> list[Row]:
    """One flat row per calibrated rule and fresh text; a rule never tried keeps its row."""
    return [
        {key: value for key, value in row.items() if key != "fresh"} | fresh
        for row in (study.get("calibrated") or {}).get("rows") or []
        for fresh in row["fresh"] or [{}]
    ]


def csv_text(rows: list[Row], columns: tuple[str, ...]) -> str:
    """Rows as CSV with a head; None is an empty field, and numbers keep all their digits."""
    known = dict.fromkeys([*columns, *(key for row in rows for key in row)])
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(known), lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
