"""How alike are learning in context and learning by gradient descent? Layer by layer.

In: the measurements of all tasks and seeds. Out: SimAOU, SimAM delta and SimAM by task, seed,
layer, way of training and control; and paired leads of one way over another, or over a control.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from layerleap.read.nested import nested_means
from layerleap.study.claims import (
    Answer,
    Claim,
    Verdict,
    above,
    all_of,
    at_every,
    share_of,
    untested,
)
from layerleap.study.engine import Section
from layerleap.study.figures import Axis, Figure, Line
from layerleap.study.icl.context import IclContext, layer_mean, merged
from layerleap.study.icl.rates import LINES, NAMES
from layerleap.study.icl.works import names, panel, working
from layerleap.study.result import Finding, Row, StudyResult, Tables
from layerleap.study.tables import Column, Table, estimate

MEASURES = {"aou": "SimAOU", "amd": "SimAM delta", "am": "SimAM"}
CONTROLS = {
    "": "", "queries": "other queries", "labels": "shuffled answers",
    "untrained": "untrained blocks",
}  # fmt: skip
SAME = 0.2  # share of the trained model's value: a smaller lag counts as the same
HIGH = 0.8  # a plain SimAM above this is high


def tables(context: IclContext) -> Tables:
    """Similarities and leads of every task."""
    rows: list[Row] = []
    leads: list[Row] = []
    layers: list[Row] = []
    for task, cells in context.cells():
        for measure in MEASURES:
            for way in (*context.settings.ways, "noise", "zero-shot"):
                for control in CONTROLS:
                    if groups := merged(cells, f"{measure}/{way}/{control}"):
                        place = {"task": task, "measure": measure, "way": way, "control": control}
                        rows += _rows(groups, place, context.seeds)
        leads += _leads(cells, {"task": task}, context.settings.ways)
        layers += _layer_leads(cells, {"task": task})
    return {"similarity": rows, "similarity_leads": leads, "layer_leads": layers}


def _rows(groups: list[Tensor], place: Row, seeds: list[int]) -> Iterator[Row]:
    """By layer and for their mean: over all seeds, and of each seed."""
    choices: list[tuple[int | None, list[Tensor]]] = [(None, groups)]
    if len(groups) > 1:
        choices += [(seed, [group]) for seed, group in zip(seeds, groups, strict=True)]
    for seed, chosen in choices:
        columns = [torch.cat([group.double(), layer_mean(group)], 1) for group in chosen]
        for column, one in enumerate(nested_means(columns), start=1):
            layer = column if column < columns[0].shape[1] else None
            yield {**place, "seed": seed, "layer": layer, **one.to_dict()}


def _leads(cells: list[dict[str, Tensor]], place: Row, ways: tuple[str, ...]) -> Iterator[Row]:
    """Paired differences of layer means, query by query."""
    pairs = [("lcgd-id/", "gd/"), ("lcgd-mat/", "lcgd-id/"), ("lcgd-tuned/", "lcgd-id/")]
    pairs += [("lcgd-mat/", "gd/"), ("lcgd-tuned/", "gd/")]
    for way in ways:
        pairs += [(f"{way}/", f"{way}/{control}") for control in CONTROLS if control]
        pairs += [(f"{way}/", "noise/")]
    for measure in ("aou", "amd"):
        for first, second in pairs:
            a, b = (merged(cells, f"{measure}/{one}") for one in (first, second))
            if a and b:
                gaps = [layer_mean(x) - layer_mean(y) for x, y in zip(a, b, strict=True)]
                estimate_ = nested_means(gaps)[0].to_dict()
                yield {**place, "measure": measure, "of": first, "over": second, **estimate_}


def _layer_leads(cells: list[dict[str, Tensor]], place: Row) -> Iterator[Row]:
    """Layer-causal minus plain gradient descent at every layer."""
    for measure in ("aou", "amd"):
        a, b = (merged(cells, f"{measure}/{way}/") for way in ("lcgd-id", "gd"))
        if a and b:
            gaps = [x.double() - y.double() for x, y in zip(a, b, strict=True)]
            for layer, one in enumerate(nested_means(gaps), start=1):
                yield {**place, "measure": measure, "layer": layer, **one.to_dict()}


def mean(result: StudyResult, task: str, measure: str, way: str, control: str = "") -> Row | None:
    """The mean over layers and seeds."""
    where = {"task": task, "measure": measure, "way": way, "control": control}
    return result.row("similarity", **where, seed=None, layer=None)


def lead(result: StudyResult, task: str, measure: str, of: str, over: str) -> Row | None:
    """A paired lead."""
    return result.row("similarity_leads", task=task, measure=measure, of=of, over=over)


def interval(row: Row, form: str = "{:.3f}") -> str:
    """A value with its interval."""
    if row["value"] is None:
        return "not measured"
    value = form.format(row["value"])
    if row["low"] is None or row["high"] is None:
        return value
    return f"{value} ({form.format(row['low'])} to {form.format(row['high'])})"


def findings(result: StudyResult) -> Iterator[Finding]:
    """Per task: the ways side by side, and the controls."""
    for task in names(result):
        for measure in ("aou", "amd"):
            known = [
                (way, row) for way in LINES if (row := mean(result, task, measure, way)) is not None
            ]
            if not known:
                continue
            words = ", ".join(f"{interval(row)} for {NAMES[way]}" for way, row in known)
            gap = lead(result, task, measure, "lcgd-id/", "gd/")
            closer = "" if gap is None else (
                f" Layer-causal minus plain: {interval(gap, '{:+.3f}')}."
            )  # fmt: skip
            yield Finding(
                f"{panel(result, task)}: mean {MEASURES[measure]} {words}.{closer}",
                under=measure, headline=measure == "aou" and task in working(result),
            )  # fmt: skip
        before, twin = (
            mean(result, task, "am", "zero-shot"), mean(result, task, "aou", "gd", "untrained"),
        )  # fmt: skip
        if before is not None:
            yield Finding(
                f"{panel(result, task)}: plain SimAM is {interval(before)} before any training.",
                under="am",
            )
        if twin is not None:
            yield Finding(
                f"{panel(result, task)}: SimAOU of gradient descent is {interval(twin)} in a model "
                "with untrained blocks.",
                under="controls",
            )


def judged(
    result: StudyResult,
    rows: list[tuple[str, Row | None]],
    answer: Callable[[str, Row], Answer],
    why: str,
    form: str,
) -> Verdict:
    """One verdict for all tasks that work; `answer` maps a row to an answer."""
    if not working(result):
        return not_learned(result)
    known = [(task, row) for task, row in rows if row is not None and row["value"] is not None]
    if not known:
        return untested("it was not measured in this run")
    answers: list[Answer] = [answer(task, row) for task, row in known]
    seen = "; ".join(f"{task} {interval(row, form)}" for task, row in known)
    return Verdict(all_of(answers), seen, why)


def not_learned(result: StudyResult) -> Verdict:
    """The verdict where no task is learned in context."""
    return untested(
        f"{result.model['name']} does not clearly learn {' or '.join(names(result))} in "
        "context, so there is nothing to compare with"
    )


def _lead_claim(text: str, measure: str, of: str, over: str) -> Claim:
    def test(result: StudyResult) -> Verdict:
        rows = [(task, lead(result, task, measure, of, over)) for task in working(result)]
        return judged(
            result, rows, lambda _, row: above(row),
            "yes if the interval of the difference, query by query, is above 0 on all tasks that "
            "are learned in context", "{:+.3f}",
        )  # fmt: skip

    return Claim(text, test)


def _untrained(result: StudyResult) -> Verdict:
    rows = []
    for task in working(result):
        gap = lead(result, task, "aou", "gd/", "gd/untrained")
        rows.append((task, None if gap is None else _negative(gap)))

    def answer(task: str, row: Row) -> Answer:
        own = mean(result, task, "aou", "gd")
        assert own is not None
        return above(row, -SAME * abs(own["value"]))

    return judged(
        result, rows, answer,
        "untrained minus trained: yes if its interval is above minus a fifth of the trained "
        "model's SimAOU, on all tasks that are learned in context", "{:+.3f}",
    )  # fmt: skip


def _negative(row: Row) -> Row:
    ends = {"low": row["high"], "high": row["low"], "value": row["value"]}
    return {**row, **{key: None if end is None else -end for key, end in ends.items()}}


def _high_before(result: StudyResult) -> Verdict:
    rows = [(task, mean(result, task, "am", "zero-shot")) for task in working(result)]
    return judged(
        result, rows, lambda _, row: above(row, HIGH),
        f"SimAM of context and zero-shot, with no training at all: yes if its interval is above "
        f"{HIGH}", "{:.3f}",
    )  # fmt: skip


def _layers(measure: str) -> Claim:
    def test(result: StudyResult) -> Verdict:
        if not working(result):
            return not_learned(result)
        answers, seen = [], []
        for task in working(result):
            rows = [
                row for row in result.rows("layer_leads", task=task, measure=measure)
                if row["value"] is not None
            ]  # fmt: skip
            own: list[Answer] = [above(row) for row in rows]
            answers.append(share_of(own, 0.5))
            seen.append(f"{task} {own.count('yes')} of {len(rows)} layers, {own.count('no')} not")
        return Verdict(
            all_of(answers), "; ".join(seen),
            "yes for a task if the interval of the difference is above 0 in half of the layers",
        )  # fmt: skip

    return Claim(f"Layer-causal training is closer in most layers ({MEASURES[measure]}).", test)


def _above_control(control: str, text: str) -> Claim:
    def test(result: StudyResult) -> Verdict:
        if not working(result):
            return not_learned(result)
        answers, seen = [], []
        for task in working(result):
            for way in ("gd", "lcgd-id"):
                over = control if control == "noise/" else f"{way}/{control}"
                if (row := lead(result, task, "aou", f"{way}/", over)) is not None:
                    answers.append(above(row))
                    seen.append(f"{task}, {NAMES[way]} {interval(row, '{:+.3f}')}")
        if not answers:
            return untested("it was not measured in this run")
        return Verdict(
            at_every(answers), "; ".join(seen),
            "yes if the interval of the difference is above 0 for both ways on all tasks, partly "
            "if for more than half of them",
        )  # fmt: skip

    return Claim(text, test)


CLAIMS = (
    _lead_claim("Layer-causal gradient descent is closer to in-context learning than plain "
                "gradient descent (SimAOU).", "aou", "lcgd-id/", "gd/"),
    _lead_claim("Layer-causal gradient descent is closer to in-context learning than plain "
                "gradient descent (SimAM delta).", "amd", "lcgd-id/", "gd/"),
    _layers("aou"), _layers("amd"),
    Claim("A model with untrained blocks reaches the SimAOU of the trained one.", _untrained),
    Claim("Plain SimAM is high before any training.", _high_before),
    _lead_claim("Through linear shortcuts, layer-causal training is closer than through the logit "
                "lens (SimAOU; not in the paper).", "aou", "lcgd-mat/", "lcgd-id/"),
    _lead_claim("Through linear shortcuts, layer-causal training is closer than through the logit "
                "lens (SimAM delta; not in the paper).", "amd", "lcgd-mat/", "lcgd-id/"),
    _lead_claim("Through tuned maps, layer-causal training is closer than through the logit lens "
                "(SimAOU; not in the paper).", "aou", "lcgd-tuned/", "lcgd-id/"),
    _lead_claim("Through tuned maps, layer-causal training is closer than through the logit lens "
                "(SimAM delta; not in the paper).", "amd", "lcgd-tuned/", "lcgd-id/"),
    _above_control("noise/", "SimAOU is higher than that of isotropic noise."),
    _above_control("queries", "SimAOU is higher than with the training's change of another query "
                   "(not in the paper)."),
    _above_control("labels", "SimAOU is higher than after training on shuffled answers (not in the "
                   "paper)."),
)  # fmt: skip


def _by_layer(measure: str) -> Callable[[StudyResult], Iterator[Row]]:
    def rows(result: StudyResult) -> Iterator[Row]:
        for way in (*LINES, "noise", "zero-shot"):
            for row in result.rows("similarity", measure=measure, way=way, control="", seed=None):
                if row["layer"] is not None and row["value"] is not None:
                    yield {**row, "x": row["layer"], "y": row["value"], "line": way,
                           "panel": panel(result, row["task"])}  # fmt: skip

    return rows


def _controls(result: StudyResult) -> Iterator[Row]:
    """Mean SimAOU of both ways of the paper, with every control."""
    order = ["", "untrained", "labels", "queries"]
    for task in names(result):
        for way in ("gd", "lcgd-id"):
            for control in order:
                if (row := mean(result, task, "aou", way, control)) is not None:
                    yield {**row, "x": row["value"], "y": CONTROLS[control] or "as it is",
                           "line": way, "panel": panel(result, task)}  # fmt: skip
        if (row := mean(result, task, "aou", "noise")) is not None:
            yield {**row, "x": row["value"], "y": "noise", "line": "noise",
                   "panel": panel(result, task)}  # fmt: skip


ALL_LINES = {
    **LINES,
    "noise": Line("isotropic noise", "grey", marker="", style="dashed", band=0),
    "zero-shot": Line("no training", "grey", marker="x", style="dashed", band=0),
}
SAMPLE = "bands and intervals: 95 %, bootstrap over seeds and queries"


def _layer_figure(measure: str, how: str) -> Figure:
    return Figure(
        measure, f"{MEASURES[measure]} by layer", how, _by_layer(measure), x=Axis("block", "layer"),
        y=Axis(MEASURES[measure]), lines=ALL_LINES, unit="queries", sample=SAMPLE,
    )  # fmt: skip


FIGURES = (
    _layer_figure(
        "aou", "The cosine of what context changes in the output of attention at the last token "
        "of a query, and of what training changes there. Outputs are normalised first.",
    ),
    _layer_figure(
        "amd", "The cosine of what context changes in the attention scores of the last token on "
        "the query's tokens, and of what training changes there; mean over heads. With rotary "
        "positions, context changes no score in the first block.",
    ),
    _layer_figure(
        "am", "The cosine of the scores themselves, as in earlier work. It compares what is mostly "
        "the same before any learning.",
    ),
    Figure(
        "controls", "SimAOU and its controls",
        "The mean over layers. Untrained blocks: the same with random weights inside the blocks. "
        "Shuffled answers: trained on wrong answers. Other queries: the training's change of "
        "another query.",
        _controls, kind="dots", x=Axis("SimAOU, mean over layers"), y=Axis("", "category"),
        lines=ALL_LINES, dodge=True, unit="queries", sample=SAMPLE,
    ),
)  # fmt: skip


def _mean_rows(result: StudyResult) -> Iterator[Row]:
    for row in result.rows("similarity", seed=None, layer=None):
        if row["measure"] == "am":
            continue
        name = NAMES.get(row["way"], "isotropic noise")
        yield {**row, "name": name, "case": CONTROLS[row["control"]],
               "title": MEASURES[row["measure"]]}  # fmt: skip


TABLES = (
    Table(
        "mean-table", "Similarity to in-context learning, mean over layers", _mean_rows,
        (Column("task"), Column("name", "trained by"), Column("case", "control")), across="title",
        cells=(estimate("value", "", "{:.3f}"),), terminal=True,
    ),
    Table(
        "leads-table", "Differences, query by query",
        lambda result: (
            {**row, "measure": MEASURES[row["measure"]], "of": _named(row["of"]),
             "over": _named(row["over"])}
            for row in result.rows("similarity_leads")
        ),
        (Column("task"), Column("measure"), Column("of"), Column("over", "minus"),
         estimate("value", "difference", "{:+.3f}"), Column("rows", "queries", "{:,.0f}")),
    ),
    Table(
        "seeds-table", "SimAOU by seed, mean over layers",
        lambda result: (
            {**row, "name": NAMES.get(row["way"], row["way"])}
            for row in result.rows("similarity", measure="aou", control="", layer=None)
            if row["seed"] is not None and row["way"] in NAMES
        ),
        (Column("task"), Column("seed")), across="name", cells=(estimate("value", "", "{:.3f}"),),
    ),
)  # fmt: skip


def _named(key: str) -> str:
    way, _, control = key.partition("/")
    name = NAMES.get(way, "isotropic noise")
    return f"{name}, {CONTROLS[control]}" if control else name


SECTION = Section(
    key="similarity", title="Does training change what context changes?", run=tables,
    needs=("rates",), short="Similarity", help="SimAOU and SimAM delta by layer",
    lead="Each query runs without demonstrations, after demonstrations in its context, and without "
    "them after training on the same demonstrations in the same order. What context changes is "
    "compared with what training changes, at the token that predicts the answer.",
    findings=findings, claims=CLAIMS, figures=FIGURES, tables=TABLES,
)  # fmt: skip
