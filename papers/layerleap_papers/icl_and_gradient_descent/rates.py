"""Learning rates: the same small search for every way of training; and does training learn at all?

In: the demonstrations of every seed, queries that are used for nothing else, and the measurements
of all tasks and seeds. Out: by way and rate, the log-probability of the right answer and the
similarities, over all seeds; the rate chosen; and by task and way, how much more likely training at
that rate makes the right answers of the study than no training, query by query.

A way that does not learn has nothing to compare with learning in context: claims that need it
cannot be told.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from layerleap import StudyResult, study
from layerleap.errors import NotFinite
from layerleap.lens import DIFFERENCE, SHARE, finite
from layerleap.study import Column, above, estimate, pick
from layerleap_papers.icl_and_gradient_descent.claims import interval
from layerleap_papers.icl_and_gradient_descent.conditions import Observed, Trial, train
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import by_task, figure, names, panel
from layerleap_papers.icl_and_gradient_descent.icl_context import (
    FAILED,
    NAMES,
    IclContext,
    layer_mean,
    mean_of,
    merged,
)

LOSSES = {"answer": "the answers", "all": "all tokens of the demonstrations, as in the paper"}
VALUE = "log_p"  # of the right answer, by which a rate is chosen
BOUNDS = {VALUE: (-math.inf, 0.0), "accuracy": SHARE}  # similarities: -1 to 1
EXTENSIONS = 5  # rates tried beyond the lowest or highest, at most
ANSWERS = {"yes": "learned by", "cannot tell": "not clearly learned by", "no": "made worse by"}
CONTROLS = {"labels": "shuffled answers", "untrained": "untrained blocks"}

Values = dict[str, list[float | None]]  # of one seed: a value per query, by measure


def tables(context: IclContext) -> study.Tables:
    """All ways and rates of all tasks, saved one by one."""
    rows, references = list[study.Row](), list[study.Row]()
    for task in context.encoded:
        search = _Search(context, task)
        for number, way in enumerate(context.settings.ways):
            n_ways = len(context.settings.ways)
            context.progress(f"learning rates on {task}", number, n_ways, "ways")
            of_way = search.way(way)
            best = best_of(of_way)
            rows += [{**row, "chosen": row is best} for row in of_way]
            if best is None:
                context.note(f"{task}: {NAMES[way]} diverges with every learning rate.")
        references += search.references()
    return {"rates": rows, "rate_references": references}


def best_of(rows: list[study.Row]) -> study.Row | None:
    """The row whose right answers are most likely; None if every rate diverges.

    Of rates that are equally good it is the highest, in whatever order they were tried: rates too
    small to change anything are alike, and the search need not go on below them.
    """
    known = [row for row in rows if row["value"] is not None]
    return max(known, key=lambda row: (row["value"], row["rate"]), default=None)


def next_rate(rows: list[study.Row]) -> float | None:
    """The rate to try next: beyond the edge at which the best one is; None if it is at none.

    The step is that between the edge and its neighbour. If every rate diverges, it is below the
    lowest.
    """
    rates, best = sorted(row["rate"] for row in rows), best_of(rows)
    if len(rates) < 2:
        return None
    if best is None or best["rate"] == rates[0]:
        rate = rates[0] ** 2 / rates[1]
    elif best["rate"] == rates[-1]:
        rate = rates[-1] ** 2 / rates[-2]
    else:
        return None
    return float(f"{rate:.3g}")


class _Search:
    """The search on one task, with the demonstrations of every seed."""

    def __init__(self, context: IclContext, task: str) -> None:
        self.context, self.task = context, task
        self.trials: dict[int, Trial] = {}
        for seed in context.seeds:
            drawn = context.draw(task, seed)
            encoded = context.encoded[task]
            self.trials[seed] = Trial(context.model, encoded, drawn.demonstrations, drawn.search)

    def way(self, way: str) -> list[study.Row]:
        """All rates of the settings, and a few beyond an edge if the best one is there."""
        rows = [self._row(way, rate) for rate in self.context.settings.rates]
        for _ in range(EXTENSIONS):
            if (rate := next_rate(rows)) is None:
                break
            rows.append(self._row(way, rate))
        return sorted(rows, key=lambda row: row["rate"])

    def _row(self, way: str, rate: float) -> study.Row:
        """One rate; its value is None if the training of any seed diverges."""
        place: study.Row = {"task": self.task, "way": way, "rate": rate}
        by_seed: list[Values] = []
        for seed, trial in self.trials.items():
            measure = partial(self._trained, trial, way, rate)
            values = self.context.saved(measure, "rate", self.task, way, rate, seed)
            if not values:
                return {**place, "value": None}
            by_seed.append(values)
        return place | _estimates(by_seed)

    def _trained(self, trial: Trial, way: str, rate: float) -> Values:
        """After training; empty if it diverges."""
        try:
            trained = trial.trained(train(self.context, trial, way, rate, trial.shown))
        except NotFinite:
            return {}
        values = _answers(trial, trained)
        if any(finite(value) is None for value in values[VALUE]):
            return {}
        for measure, by_layer in trial.similarity(trained).items():
            values[measure] = [finite(value) for value in layer_mean(by_layer)[:, 0].tolist()]
        return values

    def references(self) -> Iterator[study.Row]:
        """Zero-shot and in context."""
        cases: dict[str, Callable[[Trial], Values]] = {
            "zero-shot": lambda trial: _answers(trial, trial.zero_shot),
            "in context": lambda trial: _answers(trial, trial.in_context),
        }
        for name, measure in cases.items():
            by_seed = [
                self.context.saved(partial(measure, trial), "rate", self.task, name, seed)
                for seed, trial in self.trials.items()
            ]
            yield {"task": self.task, "case": name} | _estimates(by_seed)


def _answers(trial: Trial, observed: Observed) -> Values:
    right, log_p = trial.right(observed).double(), trial.log_p(observed)
    return {VALUE: log_p.tolist(), "accuracy": right.tolist()}


def _estimates(by_seed: list[Values]) -> study.Row:
    """Means over seeds and queries: the log-probability, the accuracy, and any similarities."""
    row: study.Row = {}
    for name in by_seed[0]:
        columns = [
            torch.tensor([math.nan if value is None else value for value in values[name]])
            for values in by_seed
        ]
        mean = mean_of(columns, BOUNDS.get(name, DIFFERENCE))
        if name == VALUE:
            row |= mean
        elif name == "accuracy":
            row["accuracy"] = mean["value"]
        else:
            row |= {f"{name}_{end}": mean[end] for end in ("value", "low", "high")}
    return row


def findings(result: StudyResult) -> Iterator[study.Said]:
    """The rates that were chosen, and whether the search ended at an edge."""
    loss = LOSSES[result.settings["tokens"]]
    for task in names(result):
        rows = result.rows("rates", task=task, chosen=True)
        if not rows:
            continue
        chosen = ", ".join(f"{row['rate']:g} for {NAMES[row['way']]}" for row in rows)
        edge = [
            NAMES[row["way"]]
            for row in rows
            if next_rate(result.rows("rates", task=task, way=row["way"])) is not None
        ]
        at = (
            f" Even after {EXTENSIONS} more rates, the best is at the edge of the search for "
            f"{', '.join(edge)}."
        )
        yield f"{task}: trained on {loss}, learning rate {chosen}.{at if edge else ''}"


def _marks(result: StudyResult) -> Iterator[study.Mark]:
    for row in result.rows("rate_references"):
        yield study.Mark("y", row["value"], row["case"], panel=panel(result, row["task"]))


SECTION = study.Section(
    key="rates",
    title="Learning rates",
    run=tables,
    required=True,
    lead="Every way of training makes one pass over the demonstrations, one at a time, with plain "
    "steps. The size of the steps is chosen by the same small search for all of them: the rate "
    "that makes the right answers of separate queries most likely, on average over the "
    "demonstrations of all seeds. No seed measures these queries. If the best rate is the lowest "
    f"or highest that was tried, the search goes on there, at most {EXTENSIONS} times.",
    findings=findings,
    shows=(
        figure(
            "rates",
            "The right answer by learning rate",
            "The mean log-probability of the right answer, in nats, after one pass of training "
            "over the demonstrations; among labels for classes, among all tokens for mappings. The "
            "best rate of each way is used from here on. Rates that diverge are left out.",
            by_task("rates", x="rate", line="{way}"),
            x=study.Axis("learning rate", "log"),
            y=study.Axis("log-probability"),
            marks=_marks,
            share_y=False,
        ),
        figure(
            "rates-aou",
            "SimAOU by learning rate",
            "The similarity of what training and what context change in attention outputs, mean "
            "over layers, on the same queries. It does not decide which rate is used.",
            by_task("rates", x="rate", y="aou_value", line="{way}"),
            x=study.Axis("learning rate", "log"),
            y=study.Axis("SimAOU"),
        ),
        study.Table(
            "rates-table",
            "Search of learning rates",
            pick("rates"),
            (
                Column("task"),
                Column("way", words=NAMES),
                Column("rate", form="{:g}"),
                estimate("value", "log-probability"),
                Column("accuracy", "right (%)", "{:.0f}", 100),
                Column("aou_value", "SimAOU", "{:.3f}", low="aou_low", high="aou_high"),
                Column("amd_value", "SimAM delta", "{:.3f}", low="amd_low", high="amd_high"),
                Column("chosen", words={True: "chosen", False: ""}),
            ),
        ),
    ),
)


def _gains(context: IclContext) -> study.Tables:
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


def _gain_findings(result: StudyResult) -> Iterator[study.Finding]:
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


LEARNS = study.Section(
    key="learns",
    title="Does training learn here?",
    run=_gains,
    needs=("rates",),
    short="Training",
    help="whether training at the chosen rates learns",
    lead="The best learning rate of a search may still be worse than no training at all. So every "
    "way is trained on the demonstrations of each seed, at its chosen rate, and asked the queries "
    "of the study, on which no rate was chosen: is the right answer more likely than without "
    "training? What a way does that does not clearly learn is shown, but no claim uses it.",
    findings=_gain_findings,
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
