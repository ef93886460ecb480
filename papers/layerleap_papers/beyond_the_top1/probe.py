"""Can the task of a layer, the rank that it works on, be read off a single state?

In: the pass over the text. Out: accuracy and AUC of a task probe on unseen documents, against
permuted labels and states without information; and the section of the study that shows them.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.errors import BadSettings, BadText
from layerleap.lens import CellSampling, ProbeScores, score_probe
from layerleap.study import Page, above, confirmed, untested
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext

PAGE = Page(__file__)
READABLE = {"yes": "can be read", "no": "cannot be read", "cannot tell": "cannot clearly be read"}
FEWEST_PERMUTATIONS = 19  # with fewer no p-value reaches 0.05


def _run(context: SaturationContext) -> study.Tables:
    return context.through_each("The task probe", lambda lens: _score(context, lens))


def _score(context: SaturationContext, lens: str) -> study.Tables:
    """With as many tasks as the rows allow; a note says if these are fewer than ranks."""
    s, data, why = context.settings, context.observed, ""
    for tasks in range(s.k, 1, -1):
        # With all ranks told apart, layers at which every rank is decided have no task.
        sampling = CellSampling(tasks=None if tasks == s.k else tasks, limit=s.cells, seed=s.seed)
        try:
            scores = score_probe(
                data.saturation[lens],
                data.states,
                sampling,
                permutations=s.permutations,
                progress=context.progress,
            )
        except (BadText, BadSettings) as error:
            if tasks == 2:
                raise
            why = str(error)
            continue
        if tasks < s.k:
            context.note(
                f"The task probe through {lens} tells {tasks} tasks apart instead of {s.k}, the "
                f"last of them with all later ones: {why}."
            )
        return _tables(lens, tasks, scores)
    raise AssertionError  # k is 3 or more


def _tables(lens: str, tasks: int, scores: ProbeScores) -> study.Tables:
    about = {
        "lens": lens,
        "tasks": tasks,
        "cells": scores.cells,
        "rows": scores.n_rows,
        "documents": scores.documents,
        "ambiguous": scores.ambiguous,
        "control_at_chance": scores.control_at_chance,
        "layers": list(scores.layers),
        **{f"sampling_{key}": value for key, value in scores.settings.items()},
    }
    return {
        "probe": [{"lens": lens, "tasks": tasks, **row} for row in scores.rows],
        "confusion": [
            {
                "lens": lens,
                "task": task,
                "predicted": predicted,
                "cells": cells,
                "share": cells / max(1, sum(row)),
            }
            for task, row in enumerate(scores.confusion, 1)
            for predicted, cells in enumerate(row, 1)
        ],
        "probes": [about],
    }


def _readable(accuracy: study.Row, about: study.Row) -> study.Answer:
    """Whether the task can be read off a state.

    Labels are permuted among all rows, but rows of a document are alike, so a p-value alone would
    be small too easily: the interval over documents has to be above chance as well. And the
    control must be at chance.
    """
    answer = above(accuracy, max(accuracy["chance"], accuracy["null"]))
    return confirmed(answer, accuracy["p"] <= study.LEVEL and about["control_at_chance"])


@PAGE.claim("probe")
def _claim(result: StudyResult) -> study.Tested:
    about, row = result.row("probes"), result.row("probe", task=None)
    if about is None or row is None:
        return untested("too few rows for a probe; see the notes")
    if row["permutations"] < FEWEST_PERMUTATIONS:
        return untested(
            f"{row['permutations']} permutations cannot give p <= 0.05; {FEWEST_PERMUTATIONS} or "
            "more can"
        )
    return _readable(row, about), {"row": row, "about": about}


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for about in result.rows("probes"):
        row = result.rows("probe", lens=about["lens"])[0]
        key = "probe" if about["control_at_chance"] else "probe_control"
        yield PAGE.say(key, about=about, row=row)
        if about["ambiguous"] > 0:
            yield PAGE.say("ambiguous", about=about)
        verdict = READABLE[_readable(row, about)]
        yield PAGE.say("readable", about=about, row=row, verdict=verdict)


def _confusion_rows(result: StudyResult) -> Iterator[study.Row]:
    k = result.settings["k"]
    for about in result.rows("probes"):
        tasks = about["tasks"]
        names = {t: f"{t}+" if t == tasks < k else str(t) for t in range(1, tasks + 1)}
        for row in result.rows("confusion", lens=about["lens"]):
            yield {
                "x": names[row["predicted"]],
                "y": names[row["task"]],
                "value": row["share"],
                "panel": f"Labels through {about['lens']}",
                "rows": about["cells"],
                "documents": about["documents"],
            }


def _auc_rows(result: StudyResult) -> Iterator[study.Row]:
    for about in result.rows("probes"):
        sample = {"rows": about["cells"], "documents": about["documents"]}
        for row in result.rows("probe", lens=about["lens"], measure="AUC"):
            at = {**sample, "x": row["task"], "panel": f"Labels through {about['lens']}"}
            yield {**at, "line": "control", "y": row["control"]}
            yield {**at, "line": "probe", "y": row["value"], "low": row["low"], "high": row["high"]}
            null = {"low": row["null_low"], "high": row["null_high"]}
            yield {**at, "line": "null", "y": row["null"], **null}


SECTION = PAGE.section(
    "probe",
    _run,
    findings=_findings,
    shows=(PAGE.figure("probe", _confusion_rows), PAGE.figure("auc", _auc_rows), _claim),
)
