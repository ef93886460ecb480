"""The whole study of the paper at the paper's size: how long it takes and how much memory it holds.

In: `study.json` of a whole run with the command's defaults, made if there is none (it takes most of
an hour). Out: two rows.
"""

from common import BUILD, MODEL, Row, study

SIZES = {"n_fit": 9000, "n_read": 3000}


def run(*, smoke: bool) -> list[Row]:
    """Seconds and peak memory of the study."""
    small = ("--quick", "--fit-texts", "60", "--read-texts", "30", "--other", "none")
    found = study(
        BUILD / ("bench-smoke-paper" if smoke else "paper"),
        ("study", "shortcuts", MODEL, *(small if smoke else ())),
        lambda settings: smoke or all(settings[key] == size for key, size in SIZES.items()),
    )
    seen, settings = found["run"], found["settings"]
    detail = {
        "note": "layerleap study shortcuts with its defaults: one pass over the fitting text, one "
        "over the text that is read, everything else from these",
        "settings": {key: settings[key] for key in (*SIZES, "part_texts", "schedule_texts",
                                                    "tuned_rows")},
        "sections": [row["key"] for row in found["sections"]],
    }  # fmt: skip
    return [
        Row("study_time", seen["seconds"] / 60, None, "minutes", 45.0, "<=", judged="ours",
            detail=detail),
        Row("study_memory", seen["peak_mib"], None, "MiB", 4096.0, "<=", judged="ours",
            detail=detail),
    ]  # fmt: skip
