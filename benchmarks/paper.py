"""The whole study of the paper at the paper's size: how long it takes and how much memory it holds.

In: `study.json` of a whole run with the command's defaults, made if there is none (it takes most of
an hour). Out: two rows.
"""

from pathlib import Path

from common import BUILD, MODEL, Row, layerleap

from layerleap.files import read_json

SIZES = {"n_fit": 9000, "n_read": 3000}


def run(*, smoke: bool) -> list[Row]:
    """Seconds and peak memory of the study."""
    found = read_json(_study_file(smoke))
    seen, settings = found["summary"]["run"], found["settings"]
    detail = {
        "note": "layerleap study shortcuts with its defaults: one pass over the fitting text, one "
        "over the text that is read, everything else from these",
        "settings": {key: settings[key] for key in (*SIZES, "part_texts", "schedule_texts",
                                                    "tuned_rows", "sections")},
    }  # fmt: skip
    return [
        Row("study_time", seen["seconds"] / 60, None, "minutes", 45.0, "<=", judged="ours",
            detail=detail),
        Row("study_memory", seen["peak_mib"], None, "MiB", 4096.0, "<=", judged="ours",
            detail=detail),
    ]  # fmt: skip


def _study_file(smoke: bool) -> Path:
    folder = BUILD / ("bench-smoke-paper" if smoke else "paper")
    path = folder / "study.json"
    if path.is_file():
        found = read_json(path)
        whole = found["summary"].get("run", {}).get("whole", False)
        if whole and (smoke or all(found["settings"][k] == v for k, v in SIZES.items())):
            return path
    small = ("--quick", "--fit-texts", "60", "--read-texts", "30", "--other", "none")
    layerleap("study", "shortcuts", MODEL, *(small if smoke else ()), "--out", str(folder))
    return path
