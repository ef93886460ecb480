"""Does in-context learning work at all? Accuracy by number of demonstrations, with controls.

In: the tasks. Out: accuracies and their leads over zero-shot, the commonest answer, copying, and
shuffled answers; and by task whether the rest of the study means anything.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from layerleap import StudyResult, study
from layerleap.act.learning import BASELINES
from layerleap.study import Column, estimate, in_words, percent, pick, points
from layerleap_papers.icl_and_gradient_descent.icl_context import LINES, IclContext

NAMES = {"majority": "commonest answer", "copy": "copying", "shuffled": "shuffled answers"}
ONE_SEED = "one seed says nothing about other demonstrations; run with more (--seeds 3)"


def tables(context: IclContext) -> study.Tables:
    """Accuracy of every task, saved task by task."""
    rows: study.Tables = {"tasks": [], "accuracy": [], "accuracy_leads": []}
    for task, encoded in context.encoded.items():
        saved = context.saved(partial(_measured, context, task), "works", task)
        n = len(encoded.pieces)
        tokens = sum(len(piece.prompt) for piece in encoded.pieces) / n
        about = {**encoded.task.to_dict(), "usable": n, "tokens": tokens}
        rows["tasks"].append({**about, "works": saved["works"]})
        rows["accuracy"] += saved["accuracy"]
        rows["accuracy_leads"] += saved["leads"]
        read = {"role": "task", "text": task, "texts": n, "documents": n, "tokens": None}
        fingerprint = encoded.task.digest
        context.account({**read, "rows": None, "fingerprint": fingerprint, "seconds": None})
    return rows


def _measured(context: IclContext, task: str) -> study.Row:
    result, shots = context.in_context(task), context.settings.demonstrations
    leads = [(over, result.lead(over, shots)) for over in (*BASELINES, "shuffled")]
    return {
        "works": result.works(shots),
        "accuracy": [{"task": task, **row} for row in result.table],
        "leads": [
            {"task": task, "over": over, "shots": shots, **lead}
            for over, lead in leads
            if lead is not None
        ],
    }


def names(result: StudyResult) -> list[str]:
    """The names of all tasks."""
    return [row["task"] for row in result.rows("tasks")]


def working(result: StudyResult) -> list[str]:
    """The tasks that the model learns in context."""
    return [row["task"] for row in result.rows("tasks", works=True)]


def panel(result: StudyResult, task: str) -> str:
    """The name of a task over its panel, marked if it is not learned in context."""
    return task if task in working(result) else f"{task} (not learned in context)"


# Words of every figure with a panel per task.
PANELS = {"task": lambda result: {task: panel(result, task) for task in names(result)}}
by_task = partial(points, panel="{task}", words=PANELS)


def figure(key: str, title: str, how: str, rows: Any, **more: Any) -> study.Figure:
    """A figure over queries and seeds, with a line per way of training."""
    sample = "bands and intervals: 95 %, over seeds and queries"
    usual = {"lines": LINES, "unit": "queries", "sample": sample}
    return study.Figure(key, title, how, rows, **{**usual, **more})


def over_seeds(*claims: study.Claim) -> tuple[study.Claim, ...]:
    """The claims, none of which is decided by one seed.

    With one, an interval is over queries alone; other demonstrations may give another answer.
    """
    return tuple(replace(claim, test=partial(_test, claim)) for claim in claims)


def _test(claim: study.Claim, result: StudyResult) -> study.Verdict:
    verdict = claim.test(result)
    if result.settings["seeds"] > 1 or verdict.agrees == "not tested":
        return verdict
    return study.Verdict("cannot tell", verdict.seen, ONE_SEED)


def findings(result: StudyResult) -> Iterator[study.Said]:
    """Per task: the accuracy without and with demonstrations, and what follows."""
    shots = result.settings["demonstrations"]
    for row in result.rows("tasks"):
        task = row["task"]
        first, most, shuffled = (
            result.row("accuracy", task=task, answers=answers, shots=n)
            for answers, n in (("true", 0), ("true", shots), ("shuffled", shots))
        )
        if first is None or most is None:
            continue
        one = ", with this one draw of demonstrations" if result.settings["seeds"] == 1 else ""
        mixed = "" if shuffled is None else f", {percent(shuffled['value'])} with shuffled answers"
        verdict = (
            f"In-context learning works here{one}."
            if row["works"]
            else "Demonstrations do not clearly help, so the rest is meaningless for this task."
        )
        yield study.Headline(
            f"{task}: {percent(first['value'])} right zero-shot, {in_words(most, '%')} "
            f"with {shots} demonstrations{mixed} ({most['rows']} queries). {verdict}"
        )


@study.claim("The model learns the tasks in context.")
def _claim_works(result: StudyResult) -> study.Verdict:
    answers: list[study.Answer] = []
    learned = working(result)
    others = [task for task in names(result) if task not in learned]
    for task in names(result):
        rows = result.rows("accuracy_leads", task=task, over=set(BASELINES))
        is_worse = "no" in map(study.above, rows)
        answers.append("yes" if task in learned else "no" if is_worse else "cannot tell")
    return study.Verdict(
        study.at_every(answers),
        f"learned: {', '.join(learned) or 'none'}; not clearly: {', '.join(others) or 'none'}",
        "yes for a task if the intervals of its lead over zero-shot, the commonest answer and "
        "copying are all above 0; partly if more than half of the tasks are learned",
    )


@study.claim("It is right less often when the answers of demonstrations are shuffled.")
def _claim_labels(result: StudyResult) -> study.Verdict:
    rows = result.rows("accuracy_leads", over="shuffled", task=set(working(result)))
    if not rows:
        return study.Verdict("not tested", "in-context learning works on none of the tasks")
    seen = "; ".join(f"{row['task']} {100 * row['value']:+.0f} points" for row in rows)
    return study.Verdict(
        study.all_of(study.above(row) for row in rows),
        seen,
        "yes if the intervals of true minus shuffled answers are above 0 on all tasks that work",
    )


def _marks(result: StudyResult) -> Iterator[study.Mark]:
    for row in result.rows("accuracy", answers={"majority", "copy"}):
        if row["answers"] == "majority" or row["value"]:
            label = NAMES[row["answers"]]
            yield study.Mark("y", row["value"], label, panel=panel(result, row["task"]))


def _cells(result: StudyResult) -> Iterator[study.Row]:
    shots = result.settings["demonstrations"]
    cases = {
        ("true", 0): "zero-shot",
        ("true", shots): f"{shots} demonstrations",
        ("shuffled", shots): NAMES["shuffled"],
        ("majority", None): NAMES["majority"],
        ("copy", None): NAMES["copy"],
    }
    kept = {
        row["task"]: row.get("still_right")
        for row in result.rows("accuracy", answers="shuffled", shots=shots)
    }
    for row in result.rows("accuracy"):
        if case := cases.get((row["answers"], row["shots"])):
            yield {**row, "case": case, "still_right": kept.get(row["task"])}


SECTION = study.Section(
    key="works",
    title="Does in-context learning work here?",
    run=tables,
    required=True,
    short="In context",
    lead="Before anything is compared: does the model get better at the task when it is shown "
    "demonstrations? Better than without any, than always giving the commonest answer, and than "
    "copying the question? If not, there is no learning in context to compare with. Accuracy is "
    "that of the first queries of each seed; later sections ask all of them.",
    findings=findings,
    shows=(
        *over_seeds(_claim_works, _claim_labels),
        figure(
            "accuracy",
            "Accuracy by number of demonstrations",
            "The share of queries whose answer is right. Of classes, the best label is the answer; "
            "of mappings, the best of all tokens. Shuffled: the same demonstrations with the "
            "answers of others; of mappings none stays right if possible, of classes as many as by "
            "chance.",
            by_task("accuracy", x="shots", line="{answers}", shots=study.KNOWN),
            x=study.Axis("demonstrations"),
            y=study.Axis("right answers", "share"),
            lines={
                "true": study.Line("true answers", "blue"),
                "shuffled": study.Line("shuffled answers", "orange", marker="s", style="dashed"),
            },
            marks=_marks,
        ),
        study.Table(
            "tasks-table",
            "The tasks",
            pick("tasks"),
            (
                Column("task"),
                Column("says", "what it asks"),
                Column("kind"),
                Column("template"),
                Column("examples", form="{:,.0f}"),
                Column("usable", form="{:,.0f}"),
                Column("tokens", "tokens of a query", "{:.1f}"),
                Column(
                    "works",
                    "learned in context",
                    words={True: "yes", False: "not clearly"},
                    colours=study.GOOD_OR_BAD,
                ),
            ),
        ),
        study.Table(
            "accuracy-table",
            "Right answers (%)",
            _cells,
            (Column("task"), Column("still_right", "still right after shuffling", "{:.0f}", 100)),
            across="case",
            cells=(estimate("value", "", "{:.0f}", 100),),
            terminal=True,
        ),
        study.Table(
            "leads-table",
            "Lead of true demonstrations, query by query (points)",
            pick("accuracy_leads"),
            (
                Column("task"),
                Column("over", words=NAMES),
                Column("shots", "demonstrations"),
                estimate("value", "lead", "{:+.1f}", 100),
                Column("rows", "queries", "{:,.0f}"),
            ),
        ),
    ),
)
