"""How long the whole `icl` study takes with the default settings: 3 tasks, 3 seeds.

In: `study.json` of a whole run; run if there is none. Out: one row.
"""

from typing import Any

from common import Row, study_row

from layerleap_papers.icl_and_gradient_descent import STUDY, IclSettings

ASKED = (
    "tasks",
    "seeds",
    "demonstrations",
    "queries",
    "most",
    "search",
    "rates",
    "lenses",
    "parameters",
    "tokens",
    "tuned_rows",
)
SMALL = (
    "--quick",
    "--task",
    "plurals",
    "--demonstrations",
    "2",
    "--most",
    "2",
    "--queries",
    "4",
    "--search",
    "2",
    "--rates",
    "0.001",
    "--lenses",
    "logit",
)


def run(*, smoke: bool) -> list[Row]:
    """Minutes for the whole study."""
    wanted = IclSettings().to_dict()
    return [study_row(STUDY, wanted, ASKED, SMALL, 40.0, smoke=smoke, about=_learned)]


def _learned(found: Any) -> dict[str, Any]:
    return {"learned_in_context": {row["task"]: row["works"] for row in found["tables"]["tasks"]}}
