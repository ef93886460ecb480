"""Does in-context learning work at all? Accuracy by number of demonstrations, with controls.

In: the tasks. Out: accuracies and their leads over zero-shot, the commonest answer, copying, and
shuffled answers; and by task whether the rest of the study means anything.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.act.learning import BASELINES
from layerleap.study import in_words, percent
from layerleap_papers.icl_and_gradient_descent.icl_context import IclContext
from layerleap_papers.icl_and_gradient_descent.seeds import over_seeds

LINES = {
    "true": study.Line("true answers", "blue"),
    "shuffled": study.Line("shuffled answers", "orange", marker="s", style="dashed"),
}
OVER = (*BASELINES, "shuffled")
NAMES = {"majority": "commonest answer", "copy": "copying", "shuffled": "shuffled answers"}


def tables(context: IclContext) -> study.Tables:
    """Accuracy of every task, saved task by task."""
    found: study.Tables = {"tasks": [], "accuracy": [], "accuracy_leads": []}
    for task, encoded in context.encoded.items():
        path = context.path("works", task)
        saved = context.saved_json(path) or context.save_json(path, _measured(context, task))
        tokens = sum(len(piece.prompt) for piece in encoded.pieces) / len(encoded.pieces)
        about = {**encoded.task.to_dict(), "usable": len(encoded.pieces), "tokens": tokens}
        found["tasks"].append({**about, "works": saved["works"]})
        found["accuracy"] += saved["accuracy"]
        found["accuracy_leads"] += saved["leads"]
        read = {"texts": len(encoded.pieces), "documents": len(encoded.pieces)}
        context.account(
            {
                "role": "task",
                "text": task,
                **read,
                "tokens": None,
                "rows": None,
                "fingerprint": encoded.task.digest,
                "seconds": None,
            }
        )
    return found


def _measured(context: IclContext, task: str) -> study.Row:
    result, shots = context.in_context(task), context.settings.demonstrations
    leads = {over: result.lead(over, shots) for over in OVER}
    return {
        "works": result.works(shots),
        "accuracy": [{"task": task, **row} for row in result.table],
        "leads": [
            {"task": task, "over": over, "shots": shots, **lead}
            for over, lead in leads.items()
            if lead is not None
        ],
    }


def names(result: StudyResult) -> list[str]:
    """The names of all tasks."""
    return [row["task"] for row in result.rows("tasks")]


def working(result: StudyResult) -> list[str]:
    """The tasks that the model learns in context."""
    return [row["task"] for row in result.rows("tasks") if row["works"]]


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
    for task in names(result):
        rows = result.rows("accuracy_leads", task=task)
        own = {study.above(row) for row in rows if row["over"] in BASELINES}
        answers.append("yes" if task in working(result) else "no" if "no" in own else "cannot tell")
    return study.Verdict(
        study.at_every(answers),
        f"learned: {', '.join(working(result)) or 'none'}; not clearly: "
        f"{', '.join(task for task in names(result) if task not in working(result)) or 'none'}",
        "yes for a task if the intervals of its lead over zero-shot, the commonest answer and "
        "copying are all above 0; partly if more than half of the tasks are learned",
    )


@study.claim("It is right less often when the answers of demonstrations are shuffled.")
def _claim_labels(result: StudyResult) -> study.Verdict:
    rows = [
        r for r in result.rows("accuracy_leads", over="shuffled") if r["task"] in working(result)
    ]
    if not rows:
        return study.Verdict("not tested", "in-context learning works on none of the tasks")
    seen = "; ".join(f"{row['task']} {100 * row['value']:+.0f} points" for row in rows)
    return study.Verdict(
        study.all_of(study.above(row) for row in rows),
        seen,
        "yes if the intervals of true minus shuffled answers are above 0 on all tasks that work",
    )


CLAIMS = (_claim_works, _claim_labels)


def _marks(result: StudyResult) -> Iterator[study.Mark]:
    for row in result.rows("accuracy"):
        if row["answers"] == "majority" or (row["answers"] == "copy" and row["value"]):
            label = NAMES[row["answers"]]
            yield study.Mark("y", row["value"], label, panel=panel(result, row["task"]))


def panel(result: StudyResult, task: str) -> str:
    """The name of a task over its panel, marked if it is not learned in context."""
    return task if task in working(result) else f"{task} (not learned in context)"


def panels(result: StudyResult) -> dict[str, str]:
    """The names of all tasks over their panels."""
    return {task: panel(result, task) for task in names(result)}


PANELS = {"task": panels}  # words of every figure with a panel per task
FIGURES = (
    study.Figure(
        "accuracy",
        "Accuracy by number of demonstrations",
        "The share of queries whose answer is right. Of classes, the best label is the answer; of "
        "mappings, the best of all tokens. Shuffled: the same demonstrations with the answers of "
        "others; of mappings none stays right if possible, of classes as many as by chance.",
        study.points(
            "accuracy", x="shots", line="{answers}", panel="{task}", words=PANELS, shots=study.KNOWN
        ),
        x=study.Axis("demonstrations"),
        y=study.Axis("right answers", "share"),
        lines=LINES,
        marks=_marks,
        unit="queries",
        sample="bands: 95 %, over seeds and queries",
    ),
)

TABLES = (
    study.Table(
        "tasks-table",
        "The tasks",
        study.pick("tasks"),
        (
            study.Column("task"),
            study.Column("says", "what it asks"),
            study.Column("kind"),
            study.Column("template"),
            study.Column("examples", form="{:,.0f}"),
            study.Column("usable", form="{:,.0f}"),
            study.Column("tokens", "tokens of a query", "{:.1f}"),
            study.Column(
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
        lambda result: _cells(result),
        (
            study.Column("task"),
            study.Column("still_right", "still right after shuffling", "{:.0f}", 100),
        ),
        across="case",
        cells=(study.estimate("value", "", "{:.0f}", 100),),
        terminal=True,
    ),
    study.Table(
        "leads-table",
        "Lead of true demonstrations, query by query (points)",
        study.pick("accuracy_leads"),
        (
            study.Column("task"),
            study.Column("over", words=NAMES),
            study.Column("shots", "demonstrations"),
            study.estimate("value", "lead", "{:+.1f}", 100),
            study.Column("rows", "queries", "{:,.0f}"),
        ),
    ),
)


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
    shows=(*over_seeds(*CLAIMS), *FIGURES, *TABLES),
)
