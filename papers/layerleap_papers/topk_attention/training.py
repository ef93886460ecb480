"""Training with top-k attention beside exact attention: from scratch on two tasks, and fine-tuning.

In: the bundled tasks, and the model if it is a decoder of text. Out: learning curves, and paired
differences between the two kinds of attention with intervals over seeds.

The two start from the same weights and see the same batches in the same order.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerleap import LayerleapError, StudyResult, study
from layerleap.errors import BadSettings
from layerleap.extras import learn_library
from layerleap.lens import mean_interval
from layerleap.study import above, below, in_words, percent, untested
from layerleap.zoo import fetch
from layerleap_papers.topk_attention import runs
from layerleap_papers.topk_attention.comparisons import kept_share, nats, shares
from layerleap_papers.topk_attention.runs import (
    EXACT,
    SWAPPED,
    TOP,
    EncoderSettings,
    Point,
    TuneSettings,
)
from layerleap_papers.topk_attention.sparsity_context import SparsityContext
from layerleap_papers.topk_attention.tasks import (
    START,
    ListOpsSettings,
    Task,
    byte_reviews,
    listops,
)

LISTOPS, REVIEWS, TUNING = "ListOps", "byte-level reviews", "fine-tuning"
TASKS = {
    LISTOPS: "Trained from scratch on ListOps, top-k attention is nearly as accurate as exact "
    "attention.",
    REVIEWS: "Trained from scratch on byte-level film reviews, top-k attention is nearly as "
    "accurate as exact attention.",
    TUNING: "Fine-tuned with top-k attention, the model ends with nearly the same loss as with "
    "exact attention.",
}
SAME_ACCURACY = 0.03  # a difference within this counts as nearly identical
SAME_TUNED = 0.02  # nats
MARGIN = 4  # and it must be at most this part of what exact attention gained by training
MOST_ITEMS = 20_000  # to train on
AnySettings = EncoderSettings | TuneSettings
Run = Callable[[str, Any, int, runs.OnStep], list[Point]]  # by attention, settings and seed


def _run(context: SparsityContext) -> study.Tables:
    names = ("training", "training_ends", "training_gaps", "training_tasks")
    tables: study.Tables = {name: [] for name in names}
    errors = []
    for name in TASKS:
        try:
            visible, baselines, settings, run = _prepared(context, name)
        except LayerleapError as error:
            errors.append(str(error))
            context.leave_out(f"Training: {name}", error)
            continue
        k = runs.keys_of(visible)
        sizes = {"k": k, "kept": kept_share(visible, k), "length": int(visible.max())}
        tables["training_tasks"].append({"task": name, **sizes, **baselines})
        values = _values(context, name, settings, run)
        for table, rows in zip(names, _estimates(name, values), strict=False):
            tables[table] += rows
    if not tables["training"]:
        raise BadSettings("; ".join(errors))
    return tables


def _prepared(context: SparsityContext, name: str) -> tuple[Tensor, study.Row, AnySettings, Run]:
    """How many keys rows of a task see, what is reached without attention, and how to run it."""
    s, model = context.settings, context.model
    if name == TUNING:
        if model.kind != "next-token" or not context.reads_plain_text:
            raise BadSettings(f"{model.identity.name} is not a decoder of plain text")
        tuning = TuneSettings(steps=s.tune_steps)
        windows = runs.review_windows(model, fetch("reviews"), tuning)
        baselines: study.Row = {"chance": None, "counts": None}
        return tuning.visible, baselines, tuning, partial(runs.fine_tuned, model, windows)
    if name == LISTOPS:
        training = EncoderSettings(steps=s.steps, batch=32)
    else:  # verdicts are noisy labels, so this task has larger batches
        training = EncoderSettings(steps=s.review_steps, batch=64, rate=2e-3)
    n = min(MOST_ITEMS, 2 * training.batch * training.steps)
    if name == LISTOPS:
        task = listops(ListOpsSettings(n_fitted=n, n_held_out=s.tested))
    else:
        task = byte_reviews(fetch("reviews"), n, s.tested)
    baselines = {"chance": task.chance, "counts": counted(task)}
    return task.held_out.lengths, baselines, training, partial(runs.from_scratch, task)


def counted(task: Task) -> float:
    """Held-out accuracy of a linear classifier of how often each symbol occurs, in any order."""
    linear, steps = map(learn_library, ("sklearn.linear_model", "sklearn.preprocessing"))
    counts = [
        torch.stack([(side.ids == s).sum(1) for s in range(START + 1, task.symbols)], 1).numpy()
        for side in (task.fitted, task.held_out)
    ]
    scale = steps.StandardScaler().fit(counts[0])
    model = linear.LogisticRegression(max_iter=1000).fit(
        scale.transform(counts[0]), task.fitted.labels.numpy()
    )
    return float(model.score(scale.transform(counts[1]), task.held_out.labels.numpy()))


# By attention, step and measure: a value for each seed.
Values = dict[tuple[str, float, str], list[float]]


def _values(context: SparsityContext, name: str, settings: AnySettings, run: Run) -> Values:
    """The curves of all runs; each finished run is kept in the work folder."""
    values, s = Values(), context.settings

    def points(attention: str, seed: int) -> list[Point]:
        words = f"{name}, {attention} attention, seed {seed}"
        file = f"run-{name}-{attention}-{seed}.json".replace(" ", "-")

        def on_step(step: int) -> None:
            context.progress(words, step, settings.steps, "steps")

        return runs.saved(context.workspace / file, lambda: run(attention, settings, seed, on_step))

    for seed in range(s.tune_seeds if name == TUNING else s.seeds):
        for attention in (EXACT, TOP):
            for point in points(attention, seed):
                kind = SWAPPED if point["swapped"] else attention
                for measure in ("loss", "accuracy"):
                    if measure in point:
                        place = (kind, point["step"], measure)
                        values.setdefault(place, []).append(point[measure])
    return values


def over_seeds(values: list[float]) -> study.Row:
    """A mean with Student's 95 % interval over seeds."""
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    mean = mean_interval(column, torch.arange(len(values)))[0].to_dict()
    return {end: mean[end] for end in ("value", "low", "high")} | {"seeds": len(values)}


def _estimates(name: str, values: Values) -> tuple[list[study.Row], ...]:
    """Learning curves, where runs end, and the end of top-k minus that of exact, seed by seed."""
    last = {(kind, measure): one for (kind, _, measure), one in values.items()}  # steps ascend

    def row(kind: str, measure: str, one: list[float], **about: float) -> study.Row:
        return {"task": name, "attention": kind, **about, "measure": measure, **over_seeds(one)}

    order = [(kind, m) for kind in (EXACT, TOP, SWAPPED) for m in ("loss", "accuracy")]
    known = [place for place in order if place in last]
    gaps = {
        (kind, m): [a - b for a, b in zip(last[kind, m], last[EXACT, m], strict=True)]
        for kind, m in known
        if kind != EXACT
    }
    return (
        [row(k, m, one, step=step) for (k, step, m), one in values.items() if k != SWAPPED],
        [row(*place, last[place]) for place in known],
        [row(*place, gap) for place, gap in gaps.items()],
    )


def _measure(task: str) -> tuple[str, Callable[[study.Row | None], str], float]:
    """What counts on a task, how it is written, and which difference counts as the same."""
    return ("loss", nats, SAME_TUNED) if task == TUNING else ("accuracy", shares, SAME_ACCURACY)


def _same(result: StudyResult, task: str) -> study.Verdict:
    measure, words, limit = _measure(task)
    row = result.row("training_gaps", task=task, attention=TOP, measure=measure)
    if row is None:
        return untested(f"{task} was not run; see the notes")
    exact, top = (
        result.row("training_ends", task=task, attention=attention, measure=measure)
        for attention in (EXACT, TOP)
    )
    about = result.rows("training_tasks", task=task)[0]
    gain, without = _gain(result, about, exact)
    if gain <= 0:
        return untested(
            f"with exact attention, {measure} is not clearly better than {without}, so there is "
            "nothing to compare; train longer"
        )
    limit = min(limit, gain / MARGIN)
    return study.Verdict(
        below(row, limit) if measure == "loss" else above(row, -limit),
        f"{measure} {words(top)} with k = {about['k']}, {percent(about['kept'])} of the keys "
        f"of a row on average, {words(exact)} with exact attention; difference "
        f"{in_words(row, '+.3f')} over {row['seeds']} seeds",
        f"yes if the interval of the paired difference is less than {limit:.2g} worse than 0, "
        f"which is at most a {MARGIN:g}th of what exact attention gains over {without}; "
        "all seeds are tested on the same held-out items",
    )


def _gain(result: StudyResult, about: study.Row, end: study.Row | None) -> tuple[float, str]:
    """By how much exact attention beats what needs no attention, or no training; the low end.

    And what it has to beat, in words.
    """
    if about["chance"] is not None:
        best = max(about["chance"], about["counts"])
        words = f"counting symbols or guessing, which need no attention ({percent(best)})"
        return (0.0 if end is None else float(end["low"] - best)), words
    curve = result.rows("training", task=about["task"], attention=EXACT, measure="loss")
    start = min(curve, key=lambda row: row["step"])
    return (0.0 if end is None else float(start["value"] - end["high"])), "before training"


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for about in result.rows("training_tasks"):
        task = about["task"]
        measure, words, _ = _measure(task)
        exact, top, swapped = (
            words(result.row("training_ends", task=task, measure=measure, attention=attention))
            for attention in (EXACT, TOP, SWAPPED)
        )
        gap = result.row("training_gaps", task=task, attention=TOP, measure=measure)
        chance = ""
        if about["chance"] is not None:
            chance = (
                f" (always giving the most frequent class: {percent(about['chance'])}, a linear "
                f"classifier of how often each symbol occurs: {percent(about['counts'])})"
            )
        yield study.Headline(
            f"{task}: held-out {measure} {exact} with exact attention and {top} with "
            f"k = {about['k']}, {percent(about['kept'])} of the keys of a row on average{chance}; "
            f"paired difference {in_words(gap, '+.3f')}."
        )
        yield (
            f"{task}: trained with exact attention and then read with k = {about['k']}, held-out "
            f"{measure} is {swapped}."
        )


def _table_rows(result: StudyResult) -> Iterator[study.Row]:
    for row in result.rows("training_ends"):
        yield {**row, "column": row["attention"]}
    for row in result.rows("training_gaps", attention=TOP):
        yield {**row, "column": "top-k minus exact"}


SECTION = study.Section(
    "training",
    "Does training with top-k attention end at the same place?",
    _run,
    "Small encoders are trained from scratch on ListOps and on film reviews read byte by byte, and "
    "the model itself is fine-tuned on film reviews, once with exact and once with top-k "
    "attention: the same weights to start from, the same batches. k keeps about an eighth of the "
    "keys that rows see. Sizes are those that take minutes, so accuracies are far from what these "
    "tasks allow; what counts is the difference.",
    help="from scratch and fine-tuning, top-k beside exact; slow",
    quick=False,
    findings=_findings,
    shows=(
        *(study.Claim(text, partial(_same, task=task)) for task, text in TASKS.items()),
        study.Figure(
            "curves",
            "Learning curves on held-out items",
            "Bands are intervals over seeds.",
            study.points("training", x="step", line="{attention}", panel="{task}: {measure}"),
            x=study.Axis("step"),
            y=study.Axis(""),
            share_y=False,
            size=(3.7, 3.3),
            sample="bands: 95 %, Student's t over seeds",
            lines={
                EXACT: study.Line("exact attention", "orange", marker="s"),
                TOP: study.Line("top-k attention", "blue"),
            },
        ),
        study.Table(
            "training-table",
            "Where runs end, and paired differences",
            _table_rows,
            (study.Column("task"), study.Column("measure", ""), study.Column("seeds")),
            across="column",
            cells=(study.estimate("value", "", "{:.3f}"),),
        ),
    ),
)
