"""How long the whole `embedding` study takes with the default settings.

In: `study.json` of a whole run; run if there is none. Out: one row.
"""

from common import BUILD, MODEL, Row, study

from layerleap.study.embedding import STUDY, EmbeddingSettings

ASKED = ("n_fit", "n_read", "k", "state_k", "active", "vectors", "fold", "kept_rows")


def run(*, smoke: bool) -> list[Row]:
    """Minutes for the whole study."""
    small = ("--quick", "--fit-texts", "60", "--read-texts", "10")
    wanted = EmbeddingSettings().to_dict()
    sections = [section.key for section in STUDY.sections]
    found = study(
        BUILD / ("bench-smoke-embedding" if smoke else "embedding") / MODEL,
        ("study", "embedding", MODEL, *(small if smoke else ())),
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
        "note": "layerleap study embedding with its defaults, model and text already cached",
        "settings": {key: settings[key] for key in ASKED},
        "rows": {row["role"]: row["rows"] for row in found["data"]},
        "peak_mib": took["peak_mib"],
    }
    return [
        Row("embedding_study", took["seconds"] / 60, None, "minutes", 20.0, "<=", judged="ours",
            detail=detail),
    ]  # fmt: skip
