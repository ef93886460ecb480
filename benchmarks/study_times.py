"""How long whole studies take with their default settings, and the memory of the largest.

In: `study.json` of a whole run in build/; run if there is none, which takes up to an hour. Out: a
row for each study, and one for memory.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common import BUILD, MODEL, SOME_SECTIONS_FAILED, Row, layerleap

from layerleap.files import read_json
from layerleap.study import Settings, Study
from layerleap_papers.beyond_the_top1 import STUDY as SATURATION
from layerleap_papers.beyond_the_top1.saturation_settings import SIZES
from layerleap_papers.embedding_space import STUDY as EMBEDDING
from layerleap_papers.icl_and_gradient_descent import STUDY as ICL
from layerleap_papers.jump_to_conclusions import STUDY as SHORTCUTS


def _rows(result: Any) -> dict[str, Any]:
    """How many rows a study fitted on and read."""
    return {"rows": {row["role"]: row["rows"] for row in result["data"]}}


def _learned(result: Any) -> dict[str, Any]:
    return {"learned_in_context": {row["task"]: row["works"] for row in result["tables"]["tasks"]}}


@dataclass(frozen=True)
class Timed:
    """A study, the settings that matter, and how it is made small for a smoke run."""

    study: Study[Any]
    settings: str  # names of those listed in the row; a run with others is not taken
    small: str  # options of a smoke run
    minutes: float
    about: Callable[[Any], Mapping[str, Any]] = _rows  # what else the row says
    sizes: Mapping[str, int] | None = None  # settings that are decided for the bundled model


TIMED = (
    Timed(
        SHORTCUTS,
        "n_fit n_read part_texts schedule_texts tuned_rows",
        "--fit-texts 60 --read-texts 30 --other none",
        45.0,
        sizes={"n_fit": 9000, "n_read": 3000},
    ),
    Timed(
        SATURATION,
        "n_fit n_read k draws walk_share permutations cells pairs prompts",
        "--fit-texts 60 --read-texts 40",
        30.0,
        sizes=dict(zip(("n_fit", "n_read"), SIZES["text"], strict=True)),
    ),
    Timed(
        EMBEDDING,
        "n_fit n_read k state_k active vectors fold kept_rows",
        "--fit-texts 60 --read-texts 10",
        20.0,
    ),
    Timed(
        ICL,
        "tasks seeds demonstrations queries most search rates lenses parameters tokens tuned_rows",
        "--task plurals --demonstrations 2 --most 2 --queries 4 --search 2 --rates 0.001 "
        "--lenses logit",
        40.0,
        _learned,
    ),
)


def run(*, smoke: bool) -> Iterator[Row]:
    """Minutes for each study, and the peak memory of `shortcuts`."""
    for timed in TIMED:
        result = _result(timed, smoke)
        took, settings = result["run"], result["settings"]
        name = timed.study.name
        detail = {
            "note": f"layerleap study {name} with its defaults, model and data already cached",
            "settings": {key: settings[key] for key in timed.settings.split()},
            "sections": [row["key"] for row in result["sections"]],
            **timed.about(result),
            "peak_mib": took["peak_mib"],
        }
        minutes, row = took["seconds"] / 60, f"{name}_study"
        if timed.study is SHORTCUTS:
            row = "study_time"
            yield Row("study_memory", took["peak_mib"], None, "MiB", at_most=4096.0, detail=detail)
        yield Row(row, minutes, None, "minutes", at_most=timed.minutes, detail=detail)


def _result(timed: Timed, smoke: bool) -> Any:
    """`study.json` of one whole run with the default settings; else the study is run."""
    study = timed.study
    folder = BUILD / (f"bench-smoke-{study.name}" if smoke else study.name) / MODEL
    path = folder / "study.json"
    if path.is_file() and _is_whole(result := read_json(path), timed, smoke):
        return result
    # What an interrupted run has finished would be taken over, and its time not counted.
    shutil.rmtree(folder / ".work", ignore_errors=True)
    small = ("--quick", *timed.small.split()) if smoke else ()
    command = ("study", study.name, MODEL, *small, "--force", "--out", str(folder))
    layerleap(*command, fine=(0, SOME_SECTIONS_FAILED))
    return read_json(path)


def _is_whole(result: Any, timed: Timed, smoke: bool) -> bool:
    """Whether one run made all sections, with the default settings and the present method."""
    run, settings, study = result.get("run", {}), result["settings"], timed.study
    defaults: Settings = study.settings()
    wanted = {**defaults.to_dict(), **(timed.sizes or {})}
    done = [row["key"] for row in result.get("sections", []) if row["status"] == "done"]
    is_default = all(settings[key] == wanted[key] for key in timed.settings.split())
    usual = [section.key for section in study.chosen(None, defaults)]
    is_all = run.get("quick") is False and done == usual
    is_current = run.get("whole", False) and run.get("method") == study.method
    return is_current and (smoke or (is_default and is_all))
