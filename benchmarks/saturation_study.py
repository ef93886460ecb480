"""How long the whole `saturation` study takes with the default settings.

In: `study.json` of a whole run; run if there is none. Out: one row.
"""

from common import BUILD, MODEL, Row, study

from layerleap.study.saturation import STUDY, SaturationSettings
from layerleap.study.saturation.settings import SIZES


def run(*, smoke: bool) -> list[Row]:
    """Minutes for the whole study."""
    small = ("--quick", "--fit-texts", "60", "--read-texts", "40")
    n_fit, n_read = SIZES["text"]
    wanted = {**SaturationSettings().to_dict(), "n_fit": n_fit, "n_read": n_read}
    asked = ("n_fit", "n_read", "k", "draws", "walk_share", "permutations", "cells", "pairs",
             "prompts")  # fmt: skip
    wanted |= {"quick": False, "sections": [section.key for section in STUDY.sections]}
    found = study(
        BUILD / ("bench-smoke-saturation" if smoke else "saturation") / MODEL,
        ("study", "saturation", MODEL, *(small if smoke else ())),
        lambda settings: (
            smoke or all(settings[key] == wanted[key] for key in (*asked, "quick", "sections"))
        ),
    )
    took, settings = found["run"], found["settings"]
    detail = {
        "note": "layerleap study saturation with its defaults, model and text already cached",
        "settings": {key: settings[key] for key in asked},
        "rows": {row["role"]: row["rows"] for row in found["data"]},
        "peak_mib": took["peak_mib"],
    }
    return [
        Row("saturation_study", took["seconds"] / 60, None, "minutes", 30.0, "<=", judged="ours",
            detail=detail),
    ]  # fmt: skip
