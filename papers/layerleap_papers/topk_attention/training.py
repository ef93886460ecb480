"""Training with top-k attention beside exact attention: from scratch on two tasks, and fine-tuning.

In: the bundled tasks, and the model if it is a decoder of text. Out: learning curves, and paired
differences between the two kinds of attention with intervals over seeds.

The two start from the same weights and see the same batches in the same order.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from layerleap import LayerleapError, StudyResult, study
from layerleap.errors import BadSettings
from layerleap.extras import learn_library
from layerleap.stream import modality, reads_pairs
from layerleap.study import above, below, estimate, in_words, percent, points, untested
from layerleap.zoo import fetch
from layerleap_papers.topk_attention import runs
from layerleap_papers.topk_attention.curves import kept_share, nats, shares
from layerleap_papers.topk_attention.encoders.byte_reviews import ByteReviewSettings, byte_reviews
from layerleap_papers.topk_attention.encoders.encoder import EncoderSettings, Point
from layerleap_papers.topk_attention.encoders.listops import ListOpsSettings, listops
from layerleap_papers.topk_attention.encoders.task import START, Task
from layerleap_papers.topk_attention.runs import EXACT, SWAPPED, TOP
from layerleap_papers.topk_attention.sparsity_context import SparsityContext
from layerleap_papers.topk_attention.sparsity_settings import SparsitySettings

LISTOPS, REVIEWS, TUNING = "ListOps", "byte-level reviews", "fine-tuning"
TASKS = (LISTOPS, REVIEWS, TUNING)
SAME_ACCURACY = 0.03  # a difference within this counts as nearly identical
SAME_TUNED = 0.02  # nats
MARGIN = 4  # and it must be at most this part of what exact attention gained by training
MOST_ITEMS = 20_000  # to train on
# Verdicts are noisy labels, so that task has larger batches.
SCRATCH: dict[str, Callable[[SparsitySettings], EncoderSettings]] = {
    LISTOPS: lambda s: EncoderSettings(steps=s.steps, batch=32),
    REVIEWS: lambda s: EncoderSettings(steps=s.review_steps, batch=64, rate=2e-3),
}

Run = Callable[[str, int], list[Point]]  # by attention and seed
Baselines = dict[str, float | None]  # accuracies; None where the loss is what counts


def _run(context: SparsityContext) -> study.Tables:
    tables: study.Tables = {
        "training": [],
        "training_ends": [],
        "training_gaps": [],
        "training_tasks": [],
    }
    errors = []
    for name in TASKS:
        try:
            seen, baselines, run = _prepared(context, name)
        except LayerleapError as error:
            errors.append(str(error))
            context.leave_out(f"Training: {name}", error)
            continue
        k = runs.keys_of(seen)
        sizes = {"k": k, "kept": kept_share(seen, k), "length": int(seen.max())}
        tables["training_tasks"].append({"task": name, **sizes, **baselines})
        points = _points_of(context, name, run)
        tables["training"] += _curves(name, points)
        tables["training_ends"] += _ends(name, points)
        tables["training_gaps"] += _gaps(name, points)
    if not tables["training"]:
        raise BadSettings("; ".join(errors))
    return tables


def _prepared(context: SparsityContext, name: str) -> tuple[Tensor, Baselines, Run]:
    """How many keys rows of a task see, what is reached without attention, and how to run it."""
    s = context.settings
    if name == TUNING:
        return _tuning(context)
    training = SCRATCH[name](s)
    n = min(MOST_ITEMS, 2 * training.batch * training.steps)
    if name == LISTOPS:
        task = listops(ListOpsSettings(n_fitted=n, n_held_out=s.tested))
    else:
        sizes = ByteReviewSettings(n_fitted=n, n_held_out=s.tested)
        task = byte_reviews(fetch("reviews"), sizes)
    baselines: Baselines = {"chance": task.chance, "counts": counted(task)}
    return task.held_out.lengths, baselines, partial(_scratch, context, task, training)


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


def _scratch(
    context: SparsityContext, task: Task, settings: EncoderSettings, attention: str, seed: int
) -> list[Point]:
    tell = _teller(context, task.name, attention, seed, settings.steps)
    return runs.from_scratch(task, attention, settings, seed, tell)


def _tuning(context: SparsityContext) -> tuple[Tensor, Baselines, Run]:
    model = context.model
    is_text = modality(model) == "text" and not reads_pairs(model)
    if model.kind != "next-token" or not is_text:
        raise BadSettings(f"{model.identity.name} is not a decoder of plain text")
    settings = runs.TuneSettings(steps=context.settings.tune_steps)
    windows = runs.review_windows(model, fetch("reviews"), settings)

    def run(attention: str, seed: int) -> list[Point]:
        tell = _teller(context, TUNING, attention, seed, settings.steps)
        return runs.fine_tuned(model, windows, attention, settings, seed, tell)

    return settings.seen, {"chance": None, "counts": None}, run


def _teller(
    context: SparsityContext, name: str, attention: str, seed: int, steps: int
) -> Callable[[int], None]:
    words = f"{name}, {attention} attention, seed {seed}"
    return lambda step: context.progress(words, step, steps, "steps")


def _points_of(context: SparsityContext, name: str, run: Run) -> list[study.Row]:
    """All points of all runs; each finished run is kept in the work folder."""
    found, s = [], context.settings
    for seed in range(s.tune_seeds if name == TUNING else s.seeds):
        for attention in (EXACT, TOP):
            file = f"run-{name}-{attention}-{seed}.json".replace(" ", "-")
            points = runs.saved(context.workspace / file, partial(run, attention, seed))
            for point in points:
                own = SWAPPED if point["swapped"] else attention
                found.append({"task": name, "attention": own, "seed": seed, **point})
    return found


def _measures(points: list[study.Row]) -> list[str]:
    return [name for name in ("loss", "accuracy") if name in points[0]]


def over_seeds(values: list[float]) -> study.Row:
    """A mean with Student's 95 % interval over seeds."""
    stats, n = learn_library("scipy.stats"), len(values)
    mean = sum(values) / n
    spread = (sum((value - mean) ** 2 for value in values) / (n - 1) / n) ** 0.5
    margin = float(stats.t.ppf(0.975, n - 1)) * spread
    return {"value": mean, "low": mean - margin, "high": mean + margin, "seeds": n}


def _curves(name: str, points: list[study.Row]) -> list[study.Row]:
    found = []
    for attention in (EXACT, TOP):
        own = [point for point in points if point["attention"] == attention]
        for step in sorted({point["step"] for point in own}):
            at = [point for point in own if point["step"] == step]
            for measure in _measures(points):
                row = over_seeds([point[measure] for point in at])
                about = {"task": name, "attention": attention, "step": step, "measure": measure}
                found.append({**about, **row})
    return found


def _last(points: list[study.Row], attention: str, measure: str) -> list[float]:
    """The values that runs end with, by seed."""
    own = [point for point in points if point["attention"] == attention]
    end = max(point["step"] for point in own)
    ends = {point["seed"]: point[measure] for point in own if point["step"] == end}
    return [ends[seed] for seed in sorted(ends)]


def _ends(name: str, points: list[study.Row]) -> list[study.Row]:
    return [
        {
            "task": name,
            "attention": attention,
            "measure": measure,
            **over_seeds(_last(points, attention, measure)),
        }
        for attention in (EXACT, TOP, SWAPPED)
        for measure in _measures(points)
    ]


def _gaps(name: str, points: list[study.Row]) -> list[study.Row]:
    """Top-k minus exact, seed by seed."""
    found = []
    for attention in (TOP, SWAPPED):
        for measure in _measures(points):
            pairs = zip(
                _last(points, attention, measure), _last(points, EXACT, measure), strict=True
            )
            row = over_seeds([ours - exact for ours, exact in pairs])
            found.append({"task": name, "attention": attention, "measure": measure, **row})
    return found


# --- claims and findings -----------------------------------------------------------------------


def _same(result: StudyResult, task: str) -> study.Verdict:
    measure, limit = ("loss", SAME_TUNED) if task == TUNING else ("accuracy", SAME_ACCURACY)
    row = result.row("training_gaps", task=task, attention=TOP, measure=measure)
    if row is None:
        return untested(f"{task} was not run; see the notes")
    ends = {
        attention: result.row("training_ends", task=task, attention=attention, measure=measure)
        for attention in (EXACT, TOP)
    }
    about = result.rows("training_tasks", task=task)[0]
    gain = _gain(result, about, ends[EXACT])
    if gain <= 0:
        return untested(
            f"with exact attention, {measure} is not clearly better than {_without(about)}, so "
            "there is nothing to compare; train longer"
        )
    words = nats if measure == "loss" else shares
    limit = min(limit, gain / MARGIN)
    return study.Verdict(
        below(row, limit) if measure == "loss" else above(row, -limit),
        f"{measure} {words(ends[TOP])} with k = {about['k']}, {percent(about['kept'])} of the keys "
        f"of a row on average, "
        f"{words(ends[EXACT])} with exact attention; difference {in_words(row, '+.3f')} over "
        f"{row['seeds']} seeds",
        f"yes if the interval of the paired difference is less than {limit:.2g} worse than 0, "
        f"which is at most a {MARGIN:g}th of what exact attention gains over {_without(about)}; "
        "all seeds are tested on the same held-out items",
    )


def _without(about: study.Row) -> str:
    """What exact attention has to beat, in words."""
    if about["chance"] is None:
        return "before training"
    best = percent(max(about["chance"], about["counts"]))
    return f"counting symbols or guessing, which need no attention ({best})"


def _gain(result: StudyResult, about: study.Row, end: study.Row | None) -> float:
    """By how much exact attention beats what needs no attention, or no training; the low end."""
    if end is None:
        return 0.0
    if about["chance"] is not None:
        return float(end["low"] - max(about["chance"], about["counts"]))
    curve = result.rows("training", task=about["task"], attention=EXACT, measure="loss")
    start = min(curve, key=lambda row: row["step"])
    return float(start["value"] - end["high"])


CLAIMS = (
    study.Claim(
        "Trained from scratch on ListOps, top-k attention is nearly as accurate as exact "
        "attention.",
        partial(_same, task=LISTOPS),
    ),
    study.Claim(
        "Trained from scratch on byte-level film reviews, top-k attention is nearly as accurate "
        "as exact attention.",
        partial(_same, task=REVIEWS),
    ),
    study.Claim(
        "Fine-tuned with top-k attention, the model ends with nearly the same loss as with exact "
        "attention.",
        partial(_same, task=TUNING),
    ),
)


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for about in result.rows("training_tasks"):
        task, measure = about["task"], "loss" if about["task"] == TUNING else "accuracy"
        get = partial(result.row, "training_ends", task=task, measure=measure)
        words = nats if measure == "loss" else shares
        gap = result.row("training_gaps", task=task, attention=TOP, measure=measure)
        chance = (
            ""
            if about["chance"] is None
            else (
                f" (always giving the most frequent class: {percent(about['chance'])}, a linear "
                f"classifier of how often each symbol occurs: {percent(about['counts'])})"
            )
        )
        yield study.Headline(
            f"{task}: held-out {measure} {words(get(attention=EXACT))} with exact attention and "
            f"{words(get(attention=TOP))} with k = {about['k']}, {percent(about['kept'])} of the "
            f"keys of a row on average{chance}; "
            f"paired difference {in_words(gap, '+.3f')}."
        )
        yield (
            f"{task}: trained with exact attention and then read with k = {about['k']}, held-out "
            f"{measure} is {words(get(attention=SWAPPED))}."
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
        *CLAIMS,
        study.Figure(
            "curves",
            "Learning curves on held-out items",
            "Bands are intervals over seeds.",
            points("training", x="step", line="{attention}", panel="{task}: {measure}"),
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
            cells=(estimate("value", "", "{:.3f}"),),
        ),
    ),
)
