"""Does training learn at all? Every way at its chosen rate, on the queries that chose the rate.

In: the measurements of all tasks and seeds. Out: by task and way, how much more likely training
makes the right answer than no training, query by query; and which trainings failed.

A way that does not learn has nothing to compare with learning in context: claims that need it
cannot be told.
"""

from collections.abc import Iterator

from layerleap.read.nested import nested_means
from layerleap.study.claims import above
from layerleap.study.engine import Section
from layerleap.study.icl.context import FAILED, IclContext, merged
from layerleap.study.icl.judged import interval
from layerleap.study.icl.rates import NAMES
from layerleap.study.icl.works import names, panel
from layerleap.study.result import Finding, Row, StudyResult, Tables
from layerleap.study.tables import GOOD_OR_BAD, Column, Table, estimate

CONTROLS = {"": "", "labels": "shuffled answers", "untrained": "untrained blocks"}


def tables(context: IclContext) -> Tables:
    """Gains over no training, and failed trainings."""
    gains: list[Row] = []
    failed: list[Row] = []
    for task, cells in context.cells():
        for way in context.settings.ways:
            if groups := merged(cells, f"gain/{way}"):
                row = nested_means([group[:, None] for group in groups])[0].to_dict()
                gains.append({"task": task, "way": way, **row, "learns": above(row) == "yes"})
        for seed, cell in zip(context.seeds, cells, strict=True):
            for _, way, control in (key.split("/") for key in cell if key.startswith(FAILED)):
                failed.append({"task": task, "seed": seed, "way": way, "control": control})
    return {"learns": gains, "failed_trainings": failed}


def findings(result: StudyResult) -> Iterator[Finding]:
    """Which ways learn a task, and trainings that failed."""
    for task in names(result):
        rows = result.rows("learns", task=task)
        sides = {True: list[str](), False: list[str]()}
        for row in rows:
            sides[row["learns"]].append(f"{NAMES[row['way']]} {interval(row, '{:+.2f}')}")
        said = [
            f"{words} {', '.join(sides[learns])}"
            for learns, words in ((True, "learned by"), (False, "not clearly learned by"))
            if sides[learns]
        ]
        if said:
            rest = " No claim rests on a way that does not clearly learn." if sides[False] else ""
            yield Finding(
                f"{panel(result, task)}: {'; '.join(said)} (gain of the right answer's "
                f"log-probability over no training, in nats).{rest}",
                under="learns-table",
            )
        for (way, control), seeds in _failures(result, task).items():
            name = f"{NAMES[way]}, {CONTROLS[control]}," if control else NAMES[way]
            yield Finding(
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
    Table(
        "learns-table", "Gain of the right answer's log-probability by training, in nats",
        lambda result: result.rows("learns"),
        (
            Column("task"), Column("way", "trained by", words=NAMES),
            estimate("value", "gain", "{:+.3f}"), Column("rows", "queries", "{:,.0f}"),
            Column("learns", words={True: "yes", False: "no"}, colours=GOOD_OR_BAD),
        ),
        terminal=True,
    ),
)  # fmt: skip

SECTION = Section(
    key="learns", title="Does training learn here?", run=tables, needs=("rates",), short="Training",
    help="whether training at the chosen rates learns",
    lead="The best learning rate of a search may still be worse than no training at all. So every "
    "way is trained on the demonstrations of each seed, at its chosen rate, and asked the queries "
    "that rates were chosen on: is the right answer more likely than without training? A way that "
    "does not learn is not compared with learning in context.",
    findings=findings, tables=TABLES,
)  # fmt: skip
