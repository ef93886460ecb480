"""How long the whole `icl` study takes with the default settings: 3 tasks, 3 seeds.

In: `study.json` of a whole run; run if there is none. Out: one row.
"""

from common import BUILD, MODEL, Row, study

from layerleap.study.icl import STUDY, IclSettings

ASKED = (
    "tasks", "seeds", "demonstrations", "queries", "most", "search", "rates", "lenses",
    "parameters", "tokens", "tuned_rows",
)  # fmt: skip
SMALL = (
    "--quick", "--task", "plurals", "--demonstrations", "2", "--most", "2", "--queries", "4",
    "--search", "2", "--rates", "0.001", "--lenses", "id",
)  # fmt: skip


def run(*, smoke: bool) -> list[Row]:
    """Minutes for the whole study."""
    wanted = IclSettings().to_dict()
    sections = [section.key for section in STUDY.sections]
    found = study(
        BUILD / ("bench-smoke-icl" if smoke else "icl") / MODEL,
        ("study", "icl", MODEL, *(SMALL if smoke else ())),
        lambda settings: (
            smoke
            or (
                all(settings[key] == wanted[key] for key in ASKED)
                and (settings["quick"], settings["sections"]) == (False, sections)
            )
        ),
    )
    took, settings = found["run"], found["settings"]
    detail = {
        "note": "layerleap study icl with its defaults, model, tasks and shortcuts already cached",
        "settings": {key: settings[key] for key in ASKED},
        "learned_in_context": {row["task"]: row["works"] for row in found["tables"]["tasks"]},
        "peak_mib": took["peak_mib"],
    }
    return [
        Row("icl_study", took["seconds"] / 60, None, "minutes", 40.0, "<=", judged="ours",
            detail=detail),
    ]  # fmt: skip
