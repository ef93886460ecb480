"""Time and memory of the whole `shortcuts` study, at the size of the paper.

In: `study.json` of a whole run with the default settings; run if there is none, which takes most of
an hour. Out: two rows.
"""

from common import BUILD, MODEL, Row, study

SIZES = {"n_fit": 9000, "n_read": 3000}


def run(*, smoke: bool) -> list[Row]:
    """Minutes and peak memory of the study."""
    small = ("--quick", "--fit-texts", "60", "--read-texts", "30", "--other", "none")
    found = study(
        BUILD / ("bench-smoke-paper" if smoke else "paper"),
        ("study", "shortcuts", MODEL, *(small if smoke else ())),
        lambda settings: smoke or all(settings[key] == size for key, size in SIZES.items()),
    )
    seen, settings = found["run"], found["settings"]
    detail = {
        "note": "layerleap study shortcuts with its defaults: one pass over the text to fit on, "
        "one over the held-out text; everything else is computed from these",
        "settings": {
            key: settings[key] for key in (*SIZES, "part_texts", "schedule_texts", "tuned_rows")
        },
        "sections": [row["key"] for row in found["sections"]],
    }
    return [
        Row("study_time", seen["seconds"] / 60, None, "minutes", at_most=45.0, detail=detail),
        Row("study_memory", seen["peak_mib"], None, "MiB", at_most=4096.0, detail=detail),
    ]
