"""Can the task of a layer, the rank that it works on, be read off a single state?

In: the pass over the text. Out: accuracy and AUC of a task probe on unseen documents, against
permuted labels and states without information; and the section of the study that shows them.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.errors import BadSettings, BadText
from layerleap.lens import CellSampling, ProbeScores, score_probe
from layerleap.study import above, confirmed, untested
from layerleap_papers.beyond_the_top1.order import interval
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext

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


@study.claim("The rank that is being decided can be told from a single state.")
def _claim(result: StudyResult) -> study.Verdict:
    about, row = result.row("probes"), result.row("probe", task=None)
    if about is None or row is None:
        return untested("too few rows for a probe; see the notes")
    if row["permutations"] < FEWEST_PERMUTATIONS:
        return untested(
            f"{row['permutations']} permutations cannot give p <= 0.05; {FEWEST_PERMUTATIONS} or "
            "more can"
        )
    return study.Verdict(
        _readable(row, about),
        f"balanced accuracy {row['value']:.3f} of {about['tasks']} tasks through {about['lens']}; "
        f"permuted labels {row['null']:.3f}, states without information {row['control']:.3f}",
        "Yes if the interval over documents is above chance and above permuted labels, p is at "
        "most 0.05, and states without information are at chance; folds by document.",
    )


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for about in result.rows("probes"):
        lens = about["lens"]
        row = result.rows("probe", lens=lens)[0]
        control = (
            "at chance, as it must be"
            if about["control_at_chance"]
            else ("NOT AT CHANCE, so do not trust this probe")
        )
        yield (
            f"Labels through {lens}, {about['tasks']} tasks: balanced accuracy "
            f"{row['value']:.3f}{interval(row, '{:.3f}')}; chance {row['chance']:.3f}, permuted "
            f"labels {row['null']:.3f} (p = {row['p']:.3g}, {row['permutations']} permutations), "
            f"random walks {row['control']:.3f}, {control}. From {about['cells']:,} (position, "
            f"layer) of {about['documents']:,} documents."
        )
        if about["ambiguous"] > 0:
            yield (
                f"{about['ambiguous']:.0%} of labels through {lens} had a choice of tasks, because "
                "ranks saturated out of order; the first was taken."
            )
        words = {"yes": "can be read", "no": "cannot be read"}
        verdict = words.get(_readable(row, about), "cannot clearly be read")
        yield study.Finding(
            f"The rank that is being decided {verdict} off a single state (labels through {lens}): "
            f"balanced accuracy {row['value']:.2f} on unseen documents, {row['null']:.2f} with "
            f"permuted labels, {row['control']:.2f} on states without information.",
            headline=True,
        )


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


SAMPLE = "balanced in each layer; folds by document; 95 % intervals, over documents"
FIGURES = (
    study.Figure(
        "probe",
        "What the probe predicts",
        "Each row sums to 100 %; the diagonal is right.",
        _confusion_rows,
        "heatmap",
        x=study.Axis("task predicted by the probe"),
        y=study.Axis("true task"),
        cell_form="{:.0%}",
        size=(4.6, 4.1),
        share_y=False,
        unit="(position, layer)",
        sample=SAMPLE,
    ),
    study.Figure(
        "auc",
        "Each task against the rest",
        "0.5 is chance. Labels are permuted among positions within each layer. States without "
        "information are random walks with the model's step sizes.",
        _auc_rows,
        "dots",
        x=study.Axis("task against all others", "category"),
        y=study.Axis("ROC-AUC on unseen documents"),
        dodge=True,
        size=(5.0, 3.7),
        columns=2,
        unit="(position, layer)",
        sample=SAMPLE,
        marks=lambda _: [study.Mark("y", 0.5)],
        lines={
            "control": study.Line("states without information", "amber", "D"),
            "probe": study.Line("the probe (95 %)", "blue"),
            "null": study.Line("permuted labels (95 %)", "pale", style="range"),
        },
    ),
)
SECTION = study.Section(
    "probe",
    "Can the task be read off a state?",
    _run,
    "A layer between the saturation layers of two ranks is said to work on the next rank: that is "
    "its task. A logistic regression predicts the task from one state, without knowing the layer.",
    short="Tasks",
    help="tasks read off states",
    findings=_findings,
    shows=(*FIGURES, _claim),
)
