"""Does training learn at all? Every way at its chosen rate, on the queries of the study.

In: the measurements of all tasks and seeds. Out: by task and way, how much more likely training
makes the right answer than no training, query by query; and which trainings failed.

A way that does not learn has nothing to compare with learning in context: claims that need it
cannot be told.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.study import Column, above, estimate, pick
from layerleap_papers.icl_and_gradient_descent.claims import interval
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import names, panel
from layerleap_papers.icl_and_gradient_descent.icl_context import (
    FAILED,
    NAMES,
    IclContext,
    mean_of,
    merged,
)

ANSWERS = {"yes": "learned by", "cannot tell": "not clearly learned by", "no": "made worse by"}
CONTROLS = {"labels": "shuffled answers", "untrained": "untrained blocks"}


def tables(context: IclContext) -> study.Tables:
    """Gains over no training, and failed trainings."""
    gains, failed = list[study.Row](), list[study.Row]()
    for task, cells in context.cells():
        for way in context.settings.ways:
            if groups := merged(cells, f"gain/{way}"):
                row = mean_of(groups)
                gains.append({"task": task, "way": way, **row, "learns": above(row)})
        for seed, cell in zip(context.seeds, cells, strict=True):
            for _, way, control in (key.split("/") for key in cell if key.startswith(FAILED)):
                failed.append({"task": task, "seed": seed, "way": way, "control": control})
    return {"learns": gains, "failed_trainings": failed}


def findings(result: StudyResult) -> Iterator[study.Finding]:
    """Which ways learn a task, and trainings that failed."""
    for task in names(result):
        rows = result.rows("learns", task=task)
        parts = []
        for answer, words in ANSWERS.items():
            if ways := [
                f"{NAMES[row['way']]} {interval(row, '+.3g')}"
                for row in rows
                if row["learns"] == answer
            ]:
                parts.append(f"{words} {', '.join(ways)}")
        if parts:
            is_idle = any(row["learns"] != "yes" for row in rows)
            rest = " No claim uses a way that does not clearly learn." if is_idle else ""
            yield study.Finding(
                f"{panel(result, task)}: {'; '.join(parts)} (gain of the right answer's "
                f"log-probability over no training, in nats).{rest}",
                under="learns-table",
            )
        failures: dict[str, list[str]] = {}
        for row in result.rows("failed_trainings", task=task):
            control = f", {CONTROLS[row['control']]}," if row["control"] else ""
            failures.setdefault(f"{NAMES[row['way']]}{control}", []).append(str(row["seed"]))
        for name, seeds in failures.items():
            yield study.Finding(
                f"{panel(result, task)}: training by {name} diverged to NaN or infinity with seed "
                f"{', '.join(seeds)}, so nothing is reported for it on this task.",
                under="learns-table",
            )


SECTION = study.Section(
    key="learns",
    title="Does training learn here?",
    run=tables,
    needs=("rates",),
    short="Training",
    help="whether training at the chosen rates learns",
    lead="The best learning rate of a search may still be worse than no training at all. So every "
    "way is trained on the demonstrations of each seed, at its chosen rate, and asked the queries "
    "of the study, on which no rate was chosen: is the right answer more likely than without "
    "training? What a way does that does not clearly learn is shown, but no claim uses it.",
    findings=findings,
    shows=(
        study.Table(
            "learns-table",
            "Gain of the right answer's log-probability by training, in nats",
            pick("learns"),
            (
                Column("task"),
                Column("way", "trained by", words=NAMES),
                estimate("value", "gain", "{:+.3f}"),
                Column("rows", "queries", "{:,.0f}"),
                Column("learns", colours=study.GOOD_OR_BAD),
            ),
            terminal=True,
        ),
    ),
)
