"""Do context and training change the same answers?

In: predictions zero-shot, in context and after training. Out: accuracy; of the changed
predictions, the share that changed in the same way (change-Jaccard); and of the queries that
training made right, the share that context made right (Rec2FTP), with how few that rests on.
"""

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from layerleap import StudyResult, study
from layerleap.act.learning import (
    Ratio,
    change_jaccard,
    recall_by_chance,
    recall_to_fine_tuned,
    shuffled,
)
from layerleap.lens import SHARE, nested_ratios
from layerleap.study import Claim, Column, estimate, percent, pick
from layerleap_papers.icl_and_gradient_descent.claims import Judged, interval
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import (
    PANELS,
    by_task,
    figure,
    names,
    over_seeds,
    panel,
)
from layerleap_papers.icl_and_gradient_descent.icl_context import NAMES, IclContext, mean_of, merged

FEWEST = 10  # counted queries: fewer say nothing about how sure a share is
FEW = 0.1  # share of queries: Rec2FTP that rests on fewer says little
CONTROLS = {"": "", "labels": "shuffled answers", "queries": "other queries"}
TITLES = {"jaccard": "change-Jaccard", "recall": "Rec2FTP"}
CASES = {
    **NAMES,
    **{f"{way}/labels": f"{name}, shuffled answers" for way, name in NAMES.items()},
    "in-context": "in context",
}
BEFORE = ("zero-shot", "in-context")


def tables(context: IclContext) -> study.Tables:
    """Accuracy after training, and both measures of changed predictions."""
    accuracy, changes = list[study.Row](), list[study.Row]()
    ways = context.settings.ways
    for task, cells in context.cells():
        for case in (*BEFORE, *ways, *(f"{way}/labels" for way in ways)):
            if groups := merged(cells, f"right/{case}"):
                accuracy.append({"task": task, "case": case, **mean_of(groups, SHARE)})
        for way in ways:
            for control in CONTROLS:
                place = {"task": task, "way": way, "control": control}
                changes += _changes(cells, place, context.seeds)
    return {"trained_accuracy": accuracy, "changes": changes}


def _changes(
    cells: list[dict[str, Tensor]], place: study.Row, seeds: list[int]
) -> Iterator[study.Row]:
    """Both measures of one way, or of one of its controls."""
    case = f"{place['way']}/labels" if place["control"] == "labels" else place["way"]
    if not merged(cells, f"prediction/{case}"):
        return
    jaccards, recalls = [], []
    for cell, seed in zip(cells, seeds, strict=True):
        before, shown, after = (cell[f"prediction/{c}"] for c in (*BEFORE, case))
        is_other = place["control"] == "queries"
        partner = shuffled(len(before), seed) if is_other else None
        jaccards.append(change_jaccard(before, shown, after, partner))
        before, shown, after = (cell[f"right/{c}"].bool() for c in (*BEFORE, case))
        recalls.append(
            recall_by_chance(before, shown)
            if is_other
            else recall_to_fine_tuned(before, shown, after)
        )
    # What one query can count at most: two changes that differ, or once.
    for measure, ratios, most in (("jaccard", jaccards, 2), ("recall", recalls, 1)):
        yield {**place, "measure": measure, **_estimate(ratios, most)}


def _estimate(ratios: list[Ratio], most: int) -> study.Row:
    """The share of all seeds, what it is a share of, and how large that is among all queries.

    A share of few queries has no interval.
    """
    hits = [ratio.hits[:, None].double() for ratio in ratios]
    counted = [ratio.counted[:, None].double() for ratio in ratios]
    value = nested_ratios(hits, counted, bounds=SHARE)[0].to_dict()
    size = mean_of(counted, (0, most))
    for row, rows in ((value, sum(int((n > 0).sum()) for n in counted)), (size, size["rows"])):
        if rows < FEWEST:
            row |= {"low": None, "high": None}
    ends = {f"size_{key}": size[key] for key in ("value", "low", "high")}
    return {**value, **ends, "counted": sum(ratio.denominator for ratio in ratios)}


def _change(
    result: StudyResult, task: str, way: str, measure: str, control: str = ""
) -> study.Row | None:
    return result.row("changes", task=task, way=way, measure=measure, control=control)


def findings(result: StudyResult) -> Iterator[study.Said]:
    """Per task: what training makes right, and what both change alike."""
    for task in names(result):
        rows = {row["case"]: row for row in result.rows("trained_accuracy", task=task)}
        known = [way for way in NAMES if way in rows]
        if not known:
            continue
        after = ", ".join(f"{percent(rows[w]['value'])} after {NAMES[w]}" for w in known)
        yield (
            f"{panel(result, task)}: {percent(rows['zero-shot']['value'])} right zero-shot, "
            f"{percent(rows['in-context']['value'])} in context, {after}."
        )
        for way in known[:2]:
            jaccard, recall = (_change(result, task, way, measure) for measure in TITLES)
            if jaccard is not None and recall is not None and recall["value"] is not None:
                controls = ", ".join(
                    f"{interval(row, '.2f')} with {CONTROLS[control]}"
                    for control in ("labels", "queries")
                    if (row := _change(result, task, way, "jaccard", control)) is not None
                )
                yield (
                    f"{panel(result, task)}, {NAMES[way]}: Rec2FTP is {interval(recall, '.2f')}"
                    f" of {recall['counted']} queries that training made right, change-Jaccard "
                    f"{interval(jaccard, '.2f')} of {jaccard['counted']} changed predictions "
                    f"({controls})."
                )


def _size(result: StudyResult, task: str, way: str) -> study.Row | None:
    """How many queries training made right, of all."""
    row = _change(result, task, way, "recall")
    return None if row is None else {**row, **study.part_of(row, "size")}


def _both(result: StudyResult, task: str, way: str) -> study.Row | None:
    """Both measures, and how far one is above the other: intervals that do not meet."""
    jaccard, recall = (_change(result, task, way, measure) for measure in TITLES)
    if recall is None or jaccard is None:
        return None
    gap = study.difference(recall, jaccard)
    return {"value": 0.0, "recall": recall, "jaccard": jaccard, "gap": gap}


def _in_words(both: study.Row) -> str:
    recall, jaccard = both["recall"], both["jaccard"]
    if both["gap"]["low"] is None:
        return f"rests on {recall['counted']} queries and {jaccard['counted']} changed predictions"
    return f"{recall['value']:.2f} against {jaccard['value']:.2f}"


def _gap(result: StudyResult, task: str) -> study.Row | None:
    a, b = (_change(result, task, way, "jaccard") for way in ("lcgd-logit", "gd"))
    return None if a is None or b is None else study.difference(a, b)


CLAIMS = (
    Claim(
        "Rec2FTP says little, because training makes few queries right.",
        Judged(
            _size,
            "queries that training made right: yes if the interval of their share is below a tenth "
            "of all queries for both ways, on all tasks that are learned in context",
            lambda row: f"{row['counted']} of {row['rows']} queries",
            by_way=True,
            answer=partial(study.below, threshold=FEW),
        ),
    ),
    Claim(
        "Rec2FTP is far above the share of predictions that change alike.",
        Judged(
            _both,
            "yes if the interval of Rec2FTP is above that of change-Jaccard for both ways, on all "
            "tasks that are learned in context",
            _in_words,
            by_way=True,
            answer=lambda row: study.above(row["gap"]),
        ),
    ),
    Claim(
        "Layer-causal training changes more predictions as context does than plain gradient "
        "descent (change-Jaccard).",
        Judged(
            _gap,
            "yes if the two intervals do not meet on all tasks that are learned in context",
            "+.2f",
            ("lcgd-logit", "gd"),
        ),
    ),
)

SECTION = study.Section(
    key="changes",
    title="Does training change the same answers?",
    run=tables,
    needs=("learns",),
    short="Answers",
    help="changed predictions, Rec2FTP",
    lead="A prediction is the answer to a query. Context and training each change some of the "
    "answers that the model gives without either. How many of these changes are the same? "
    "Controls: training on shuffled answers, for the paper's two ways alone, because it costs "
    "another training; and other queries: for change-Jaccard, what training changes for another "
    "query, for Rec2FTP, the share of all queries wrong zero-shot that context makes right. Noise "
    "makes no predictions, and those of untrained blocks are random, so neither is a control here.",
    findings=findings,
    shows=(
        *over_seeds(*CLAIMS),
        figure(
            "changes",
            "Predictions changed alike",
            "Change-Jaccard: of all changes of predictions by context or training, the share that "
            "is the same. Rec2FTP: of the queries that training made right, the share that context "
            "made right. Beside each point: of how many; shares of fewer than 10 have no interval.",
            by_task(
                "changes",
                x="value",
                y="measure",
                line="{way}",
                note="of {counted}",
                words={**PANELS, "measure": TITLES},
                control="",
            ),
            kind="dots",
            x=study.Axis("share", "share"),
            y=study.Axis("", "category"),
            dodge=True,
        ),
        study.Table(
            "trained-table",
            "Right answers (%)",
            pick("trained_accuracy", words={"case": CASES}),
            (Column("task"),),
            across="case",
            cells=(estimate("value", "", "{:.0f}", 100),),
            terminal=True,
        ),
        study.Table(
            "changes-table",
            "Changed predictions",
            pick("changes"),
            (
                Column("task"),
                Column("way", "trained by", words=NAMES),
                Column("measure", words=TITLES),
                Column("control", words=CONTROLS),
                estimate("value", "share"),
                Column("counted", "of", "{:,.0f}"),
                Column("rows", "queries", "{:,.0f}"),
            ),
        ),
    ),
)
