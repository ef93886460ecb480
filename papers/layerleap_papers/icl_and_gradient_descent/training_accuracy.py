"""Does training learn at all? Every way at its chosen rate, on the queries of the study.

In: the measurements of all tasks and seeds. Out: by task and way, how much more likely training
makes the right answer than no training, query by query; and which trainings failed.

A way that does not learn has nothing to compare with learning in context: claims that need it
cannot be told.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.lens import nested_means
from layerleap.study import above, estimate, pick
from layerleap_papers.icl_and_gradient_descent.claims import interval
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import names, panel
from layerleap_papers.icl_and_gradient_descent.icl_context import FAILED, IclContext, merged
from layerleap_papers.icl_and_gradient_descent.rates import NAMES

ANSWERS = {
    "yes": "learned by",
    "cannot tell": "not clearly learned by",
    "no": "made worse by",
}
CONTROLS = {"": "", "labels": "shuffled answers", "untrained": "untrained blocks"}


def tables(context: IclContext) -> study.Tables:
    """Gains over no training, and failed trainings."""
    gains: list[study.Row] = []
    failed: list[study.Row] = []
    for task, cells in context.cells():
        for way in context.settings.ways:
            if groups := merged(cells, f"gain/{way}"):
                row = nested_means([group[:, None] for group in groups])[0].to_dict()
                gains.append({"task": task, "way": way, **row, "learns": above(row)})
        for seed, cell in zip(context.seeds, cells, strict=True):
            for _, way, control in (key.split("/") for key in cell if key.startswith(FAILED)):
                failed.append({"task": task, "seed": seed, "way": way, "control": control})
    return {"learns": gains, "failed_trainings": failed}


def findings(result: StudyResult) -> Iterator[study.Finding]:
    """Which ways learn a task, and trainings that failed."""
    for task in names(result):
        rows = result.rows("learns", task=task)
        said = []
        for answer, words in ANSWERS.items():
            own = [row for row in rows if row["learns"] == answer]
            if own:
                ways = ", ".join(f"{NAMES[row['way']]} {interval(row, '+.3g')}" for row in own)
                said.append(f"{words} {ways}")
        if said:
            is_idle = any(row["learns"] != "yes" for row in rows)
            rest = " No claim uses a way that does not clearly learn." if is_idle else ""
            yield study.Finding(
                f"{panel(result, task)}: {'; '.join(said)} (gain of the right answer's "
                f"log-probability over no training, in nats).{rest}",
                under="learns-table",
            )
        for (way, control), seeds in _failures(result, task).items():
            name = f"{NAMES[way]}, {CONTROLS[control]}," if control else NAMES[way]
            yield study.Finding(
                f"{panel(result, task)}: training by {name} diverged to NaN or infinity with seed "
                f"{', '.join(map(str, seeds))}, so nothing is reported for it on this task.",
                under="learns-table",
            )


def _failures(result: StudyResult, task: str) -> dict[tuple[str, str], list[int]]:
    by: dict[tuple[str, str], list[int]] = {}
    for row in result.rows("failed_trainings", task=task):
        by.setdefault((row["way"], row["control"]), []).append(row["seed"])
    return by


TABLES = (
    study.Table(
        "learns-table",
        "Gain of the right answer's log-probability by training, in nats",
        pick("learns"),
        (
            study.Column("task"),
            study.Column("way", "trained by", words=NAMES),
            estimate("value", "gain", "{:+.3f}"),
            study.Column("rows", "queries", "{:,.0f}"),
            study.Column("learns", colours=study.GOOD_OR_BAD),
        ),
        terminal=True,
    ),
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
    shows=(*TABLES,),
)
