"""How alike are learning in context and learning by gradient descent? Layer by layer.

In: the measurements of all tasks and seeds. Out: SimAOU, SimAM delta and SimAM by task, seed,
layer, way of training and control; and paired leads of one way over another, or over a control.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from layerleap import StudyResult
from layerleap.lens import nested_means
from layerleap.study import (
    Axis,
    Column,
    Figure,
    Finding,
    Line,
    Row,
    Section,
    Table,
    Tables,
    estimate,
)
from layerleap_papers.icl_and_gradient_descent.context import IclContext, layer_mean, merged
from layerleap_papers.icl_and_gradient_descent.judged import CLAIMS, MEASURES, interval, lead, mean
from layerleap_papers.icl_and_gradient_descent.rates import LINES, NAMES
from layerleap_papers.icl_and_gradient_descent.seeds import over_seeds
from layerleap_papers.icl_and_gradient_descent.works import names, panel, working

CONTROLS = {
    "": "",
    "queries": "other queries",
    "labels": "shuffled answers",
    "untrained": "untrained blocks",
}


def tables(context: IclContext) -> Tables:
    """Similarities and leads of every task."""
    rows: list[Row] = []
    leads: list[Row] = []
    layers: list[Row] = []
    untrained: list[Row] = []
    for task, cells in context.cells():
        for measure in MEASURES:
            for way in (*context.settings.ways, "noise", "zero-shot"):
                for control in CONTROLS:
                    if groups := merged(cells, f"{measure}/{way}/{control}"):
                        place = {"task": task, "measure": measure, "way": way, "control": control}
                        rows += _rows(groups, place, context.seeds)
        leads += _leads(cells, {"task": task}, context.settings.ways)
        layers += _layer_leads(cells, {"task": task})
        untrained += _untrained_leads(cells, {"task": task})
    return {
        "similarity": rows,
        "similarity_leads": leads,
        "layer_leads": layers,
        "untrained_leads": untrained,
    }


def _rows(groups: list[Tensor], place: Row, seeds: list[int]) -> Iterator[Row]:
    """By layer and for their mean: over all seeds, and of each seed."""
    choices: list[tuple[int | None, list[Tensor]]] = [(None, groups)]
    if len(groups) > 1:
        choices += [(seed, [group]) for seed, group in zip(seeds, groups, strict=True)]
    for seed, chosen in choices:
        columns = [torch.cat([group.double(), layer_mean(group)], 1) for group in chosen]
        for column, one in enumerate(nested_means(columns, bounds=(-1, 1)), start=1):
            layer = column if column < columns[0].shape[1] else None
            yield {**place, "seed": seed, "layer": layer, **one.to_dict()}


def _leads(cells: list[dict[str, Tensor]], place: Row, ways: tuple[str, ...]) -> Iterator[Row]:
    """Paired differences of layer means, query by query."""
    pairs = [
        ("lcgd-logit/", "gd/"),
        ("lcgd-linear/", "lcgd-logit/"),
        ("lcgd-tuned/", "lcgd-logit/"),
    ]
    pairs += [("lcgd-linear/", "gd/"), ("lcgd-tuned/", "gd/")]
    for way in ways:
        pairs += [(f"{way}/", f"{way}/{control}") for control in CONTROLS if control]
        pairs += [(f"{way}/", "noise/")]
    for measure in ("aou", "amd"):
        for first, second in pairs:
            a, b = (merged(cells, f"{measure}/{one}") for one in (first, second))
            if a and b:
                gaps = [paired_mean(x, y) for x, y in zip(a, b, strict=True)]
                estimate_ = nested_means(gaps)[0].to_dict()
                yield {**place, "measure": measure, "of": first, "over": second, **estimate_}


def paired_mean(x: Tensor, y: Tensor) -> Tensor:
    """The mean difference over the layers that both have: (query, 1)."""
    return layer_mean(x.double() - y.double())


def _layer_leads(cells: list[dict[str, Tensor]], place: Row) -> Iterator[Row]:
    """Layer-causal minus plain gradient descent at every layer."""
    for measure in ("aou", "amd"):
        a, b = (merged(cells, f"{measure}/{way}/") for way in ("lcgd-logit", "gd"))
        if a and b:
            gaps = [x.double() - y.double() for x, y in zip(a, b, strict=True)]
            for layer, one in enumerate(nested_means(gaps), start=1):
                yield {**place, "measure": measure, "layer": layer, **one.to_dict()}


def _untrained_leads(cells: list[dict[str, Tensor]], place: Row) -> Iterator[Row]:
    """SimAOU with untrained blocks minus that of the trained model, query by query."""
    a, b = (merged(cells, f"aou/gd/{control}") for control in ("untrained", ""))
    if a and b:
        gaps = [paired_mean(x, y) for x, y in zip(a, b, strict=True)]
        yield {**place, **nested_means(gaps)[0].to_dict()}


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
            gap = lead(result, task, measure, "lcgd-logit/", "gd/")
            closer = (
                "" if gap is None else (f" Layer-causal minus plain: {interval(gap, '{:+.3f}')}.")
            )
            yield Finding(
                f"{panel(result, task)}: mean {MEASURES[measure]} {words}.{closer}",
                under=measure,
                headline=measure == "aou" and task in working(result),
            )
        before, twin = (
            mean(result, task, "am", "zero-shot"),
            mean(result, task, "aou", "gd", "untrained"),
        )
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


def _by_layer(measure: str) -> Callable[[StudyResult], Iterator[Row]]:
    def rows(result: StudyResult) -> Iterator[Row]:
        for way in (*LINES, "noise", "zero-shot"):
            for row in result.rows("similarity", measure=measure, way=way, control="", seed=None):
                if row["layer"] is not None and row["value"] is not None:
                    yield {
                        **row,
                        "x": row["layer"],
                        "y": row["value"],
                        "line": way,
                        "panel": panel(result, row["task"]),
                    }

    return rows


def _controls(result: StudyResult) -> Iterator[Row]:
    """Mean SimAOU of both ways of the paper, with every control."""
    order = ["", "untrained", "labels", "queries"]
    for task in names(result):
        for way in ("gd", "lcgd-logit"):
            for control in order:
                if (row := mean(result, task, "aou", way, control)) is not None:
                    yield {
                        **row,
                        "x": row["value"],
                        "y": CONTROLS[control] or "as it is",
                        "line": way,
                        "panel": panel(result, task),
                    }
        if (row := mean(result, task, "aou", "noise")) is not None:
            yield {
                **row,
                "x": row["value"],
                "y": "noise",
                "line": "noise",
                "panel": panel(result, task),
            }


ALL_LINES = {
    **LINES,
    "noise": Line("isotropic noise", "grey", marker="", style="dashed", band=0),
    "zero-shot": Line("no training", "grey", marker="x", style="dashed", band=0),
}
SAMPLE = "bands and intervals: 95 %, over seeds and queries"


def _layer_figure(measure: str, how: str) -> Figure:
    return Figure(
        measure,
        f"{MEASURES[measure]} by layer",
        how,
        _by_layer(measure),
        x=Axis("block", "layer"),
        y=Axis(MEASURES[measure]),
        lines=ALL_LINES,
        unit="queries",
        sample=SAMPLE,
    )


FIGURES = (
    _layer_figure(
        "aou",
        "The cosine of what context changes in the output of attention at the last token "
        "of a query, and of what training changes there. Outputs are normalised first.",
    ),
    _layer_figure(
        "amd",
        "The cosine of what context changes in the attention scores of the last token on "
        "the query's tokens, and of what training changes there; mean over heads. With rotary "
        "positions, context changes no score in the first block.",
    ),
    _layer_figure(
        "am",
        "The cosine of the scores themselves, as in earlier work. It compares what is mostly "
        "the same before any learning.",
    ),
    Figure(
        "controls",
        "SimAOU and its controls",
        "The mean over layers. Untrained blocks: the same with random weights inside the blocks, "
        "other ones for every seed. "
        "Shuffled answers: trained on the same answers dealt out anew, none of them right if "
        "possible, or of classes as many as by chance. Other queries: the training's change of "
        "another query.",
        _controls,
        kind="dots",
        x=Axis("SimAOU, mean over layers"),
        y=Axis("", "category"),
        lines=ALL_LINES,
        dodge=True,
        unit="queries",
        sample=SAMPLE,
    ),
)


def _mean_rows(result: StudyResult) -> Iterator[Row]:
    for row in result.rows("similarity", seed=None, layer=None):
        if row["measure"] == "am":
            continue
        name = NAMES.get(row["way"], "isotropic noise")
        yield {
            **row,
            "name": name,
            "case": CONTROLS[row["control"]],
            "title": MEASURES[row["measure"]],
        }


TABLES = (
    Table(
        "mean-table",
        "Similarity to in-context learning, mean over layers",
        _mean_rows,
        (Column("task"), Column("name", "trained by"), Column("case", "control")),
        across="title",
        cells=(estimate("value", "", "{:.3f}"),),
        terminal=True,
    ),
    Table(
        "leads-table",
        "Differences, query by query",
        lambda result: (
            {
                **row,
                "measure": MEASURES[row["measure"]],
                "of": _named(row["of"]),
                "over": _named(row["over"]),
            }
            for row in result.rows("similarity_leads")
        ),
        (
            Column("task"),
            Column("measure"),
            Column("of"),
            Column("over", "minus"),
            estimate("value", "difference", "{:+.3f}"),
            Column("rows", "queries", "{:,.0f}"),
        ),
    ),
    Table(
        "seeds-table",
        "SimAOU by seed, mean over layers",
        lambda result: (
            {**row, "name": NAMES.get(row["way"], row["way"])}
            for row in result.rows("similarity", measure="aou", control="", layer=None)
            if row["seed"] is not None and row["way"] in NAMES
        ),
        (Column("task"), Column("seed")),
        across="name",
        cells=(estimate("value", "", "{:.3f}"),),
    ),
)


def _named(key: str) -> str:
    way, _, control = key.partition("/")
    name = NAMES.get(way, "isotropic noise")
    return f"{name}, {CONTROLS[control]}" if control else name


SECTION = Section(
    key="similarity",
    title="Does training change what context changes?",
    run=tables,
    needs=("learns",),
    short="Similarity",
    help="SimAOU and SimAM delta by layer",
    lead="Each query runs without demonstrations, after demonstrations in its context, and without "
    "them after training on the same demonstrations in the same order. What context changes is "
    "compared with what training changes, at the token that predicts the answer.",
    findings=findings,
    claims=over_seeds(*CLAIMS),
    figures=FIGURES,
    tables=TABLES,
)
