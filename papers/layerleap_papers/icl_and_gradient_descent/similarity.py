"""How alike are learning in context and learning by gradient descent? Layer by layer.

In: the measurements of all tasks and seeds. Out: SimAOU, SimAM delta and SimAM by task, seed,
layer, way of training and control; and paired leads of one way over another, or over a control.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.lens import nested_means
from layerleap.study import estimate, pick, points
from layerleap_papers.icl_and_gradient_descent.claims import CLAIMS, MEASURES, interval, lead, mean
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import PANELS, names, panel, working
from layerleap_papers.icl_and_gradient_descent.icl_context import IclContext, layer_mean, merged
from layerleap_papers.icl_and_gradient_descent.rates import LINES, NAMES
from layerleap_papers.icl_and_gradient_descent.seeds import over_seeds

CONTROLS = {
    "": "",
    "queries": "other queries",
    "labels": "shuffled answers",
    "untrained": "untrained blocks",
}


def tables(context: IclContext) -> study.Tables:
    """Similarities and leads of every task."""
    rows: list[study.Row] = []
    leads: list[study.Row] = []
    layers: list[study.Row] = []
    untrained: list[study.Row] = []
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


def _rows(groups: list[Tensor], place: study.Row, seeds: list[int]) -> Iterator[study.Row]:
    """By layer and for their mean: over all seeds, and of each seed."""
    choices: list[tuple[int | None, list[Tensor]]] = [(None, groups)]
    if len(groups) > 1:
        choices += [(seed, [group]) for seed, group in zip(seeds, groups, strict=True)]
    for seed, chosen in choices:
        columns = [torch.cat([group.double(), layer_mean(group)], 1) for group in chosen]
        for column, one in enumerate(nested_means(columns, bounds=(-1, 1)), start=1):
            layer = column if column < columns[0].shape[1] else None
            yield {**place, "seed": seed, "layer": layer, **one.to_dict()}


def _leads(
    cells: list[dict[str, Tensor]], place: study.Row, ways: tuple[str, ...]
) -> Iterator[study.Row]:
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


def _layer_leads(cells: list[dict[str, Tensor]], place: study.Row) -> Iterator[study.Row]:
    """Layer-causal minus plain gradient descent at every layer."""
    for measure in ("aou", "amd"):
        a, b = (merged(cells, f"{measure}/{way}/") for way in ("lcgd-logit", "gd"))
        if a and b:
            gaps = [x.double() - y.double() for x, y in zip(a, b, strict=True)]
            for layer, one in enumerate(nested_means(gaps), start=1):
                yield {**place, "measure": measure, "layer": layer, **one.to_dict()}


def _untrained_leads(cells: list[dict[str, Tensor]], place: study.Row) -> Iterator[study.Row]:
    """SimAOU with untrained blocks minus that of the trained model, query by query."""
    a, b = (merged(cells, f"aou/gd/{control}") for control in ("untrained", ""))
    if a and b:
        gaps = [paired_mean(x, y) for x, y in zip(a, b, strict=True)]
        yield {**place, **nested_means(gaps)[0].to_dict()}


def findings(result: StudyResult) -> Iterator[study.Finding]:
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
            closer = "" if gap is None else (f" Layer-causal minus plain: {interval(gap, '+.3f')}.")
            yield study.Finding(
                f"{panel(result, task)}: mean {MEASURES[measure]} {words}.{closer}",
                under=measure,
                headline=measure == "aou" and task in working(result),
            )
        before, control = (
            mean(result, task, "am", "zero-shot"),
            mean(result, task, "aou", "gd", "untrained"),
        )
        if before is not None:
            yield study.Finding(
                f"{panel(result, task)}: plain SimAM is {interval(before)} before any training.",
                under="am",
            )
        if control is not None:
            yield study.Finding(
                f"{panel(result, task)}: SimAOU of gradient descent is {interval(control)} in a "
                "model with untrained blocks.",
                under="controls",
            )


ALL_LINES = {
    **LINES,
    "noise": study.Line("isotropic noise", "grey", marker="", style="dashed", band=0),
    "zero-shot": study.Line("no training", "grey", marker="x", style="dashed", band=0),
}
ALL_NAMES = {**NAMES, "noise": "isotropic noise"}
CASES = {
    f"{way}/{control}": f"{name}, {words}" if control else name
    for way, name in ALL_NAMES.items()
    for control, words in CONTROLS.items()
}
BY_CONTROL = partial(
    points,
    "similarity",
    x="value",
    y="control",
    line="{way}",
    panel="{task}",
    measure="aou",
    seed=None,
    layer=None,
)
OF_WAYS = BY_CONTROL(
    way=("gd", "lcgd-logit"),
    control=("", "untrained", "labels", "queries"),
    words={**PANELS, "control": {**CONTROLS, "": "as it is"}},
)
OF_NOISE = BY_CONTROL(way="noise", words={**PANELS, "control": {"": "noise"}})
SAMPLE = "bands and intervals: 95 %, over seeds and queries"


def _layer_figure(measure: str, how: str) -> study.Figure:
    return study.Figure(
        measure,
        f"{MEASURES[measure]} by layer",
        how,
        points(
            "similarity",
            line="{way}",
            panel="{task}",
            words=PANELS,
            way=ALL_LINES,
            measure=measure,
            control="",
            seed=None,
            layer=study.KNOWN,
        ),
        x=study.Axis("block", "layer"),
        y=study.Axis(MEASURES[measure]),
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
    study.Figure(
        "controls",
        "SimAOU and its controls",
        "The mean over layers. Untrained blocks: the same with random weights inside the blocks, "
        "other ones for every seed. "
        "Shuffled answers: trained on the same answers dealt out anew, none of them right if "
        "possible, or of classes as many as by chance. Other queries: the training's change of "
        "another query.",
        OF_WAYS + OF_NOISE,
        kind="dots",
        x=study.Axis("SimAOU, mean over layers"),
        y=study.Axis("", "category"),
        lines=ALL_LINES,
        dodge=True,
        unit="queries",
        sample=SAMPLE,
    ),
)


TABLES = (
    study.Table(
        "mean-table",
        "Similarity to in-context learning, mean over layers",
        pick(
            "similarity",
            measure={"aou", "amd"},
            seed=None,
            layer=None,
            words={"way": ALL_NAMES, "control": CONTROLS, "measure": MEASURES},
        ),
        (study.Column("task"), study.Column("way", "trained by"), study.Column("control")),
        across="measure",
        cells=(estimate("value", "", "{:.3f}"),),
        terminal=True,
    ),
    study.Table(
        "leads-table",
        "Differences, query by query",
        pick("similarity_leads", words={"measure": MEASURES, "of": CASES, "over": CASES}),
        (
            study.Column("task"),
            study.Column("measure"),
            study.Column("of"),
            study.Column("over", "minus"),
            estimate("value", "difference", "{:+.3f}"),
            study.Column("rows", "queries", "{:,.0f}"),
        ),
    ),
    study.Table(
        "seeds-table",
        "SimAOU by seed, mean over layers",
        pick(
            "similarity",
            measure="aou",
            control="",
            layer=None,
            seed=study.KNOWN,
            way=set(NAMES),
            words={"way": NAMES},
        ),
        (study.Column("task"), study.Column("seed")),
        across="way",
        cells=(estimate("value", "", "{:.3f}"),),
    ),
)


SECTION = study.Section(
    key="similarity",
    title="Does training change what context changes?",
    run=tables,
    needs=("learns",),
    help="SimAOU and SimAM delta by layer",
    lead="Each query runs without demonstrations, after demonstrations in its context, and without "
    "them after training on the same demonstrations in the same order. What context changes is "
    "compared with what training changes, at the token that predicts the answer.",
    findings=findings,
    shows=(*over_seeds(*CLAIMS), *FIGURES, *TABLES),
)
