"""How alike are learning in context and learning by gradient descent? By layer, and by examples.

In: the measurements of all tasks and seeds. Out: SimAOU, SimAM delta and SimAM by task, seed,
layer, way of training and control; paired leads of one way over another, or over a control; and
both measures after each number of demonstrations: k shown, and the first k trained on.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.lens import DIFFERENCE, nested_means
from layerleap.study import Column, estimate, pick
from layerleap_papers.icl_and_gradient_descent.claims import CLAIMS, MEASURES, interval, lead, mean
from layerleap_papers.icl_and_gradient_descent.conditions import CURVE_QUERIES
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import (
    PANELS,
    by_task,
    figure,
    names,
    over_seeds,
    panel,
    working,
)
from layerleap_papers.icl_and_gradient_descent.icl_context import (
    LINES,
    NAMES,
    IclContext,
    layer_mean,
    mean_of,
    merged,
)

CONTROLS = {
    "": "",
    "queries": "other queries",
    "labels": "shuffled answers",
    "untrained": "untrained blocks",
}
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
COMPARED = (
    ("lcgd-logit/", "gd/"),
    ("lcgd-linear/", "lcgd-logit/"),
    ("lcgd-tuned/", "lcgd-logit/"),
    ("lcgd-linear/", "gd/"),
    ("lcgd-tuned/", "gd/"),
)


def tables(context: IclContext) -> study.Tables:
    """Similarities and leads of every task."""
    names = ("similarity", "similarity_leads", "layer_leads", "untrained_leads")
    rows: study.Tables = {name: [] for name in names}
    for task, cells in context.cells():
        for measure in MEASURES:
            for way in (*context.settings.ways, "noise", "zero-shot"):
                for control in CONTROLS:
                    if groups := merged(cells, f"{measure}/{way}/{control}"):
                        place = {"task": task, "measure": measure, "way": way, "control": control}
                        rows["similarity"] += _rows(groups, place, context.seeds)
        rows["similarity_leads"] += _leads(cells, {"task": task}, context.settings.ways)
        rows["layer_leads"] += _layer_leads(cells, {"task": task})
        rows["untrained_leads"] += _untrained_leads(cells, {"task": task})
    return rows


def _rows(groups: list[Tensor], place: study.Row, seeds: list[int]) -> Iterator[study.Row]:
    """By layer and for their mean: over all seeds, and of each seed."""
    choices: list[tuple[int | None, list[Tensor]]] = [(None, groups)]
    if len(groups) > 1:
        choices += [(seed, [group]) for seed, group in zip(seeds, groups, strict=True)]
    for seed, chosen in choices:
        columns = [torch.cat([group.double(), layer_mean(group)], 1) for group in chosen]
        for column, one in enumerate(nested_means(columns, bounds=DIFFERENCE), start=1):
            layer = column if column < columns[0].shape[1] else None
            yield {**place, "seed": seed, "layer": layer, **one.to_dict()}


def _gaps(cells: list[dict[str, Tensor]], first: str, second: str) -> list[Tensor]:
    """By seed, how much more one is than the other: (query, layer); empty if a seed lacks one."""
    a, b = merged(cells, first), merged(cells, second)
    return [x.double() - y.double() for x, y in zip(a, b, strict=True)] if a and b else []


def _leads(
    cells: list[dict[str, Tensor]], place: study.Row, ways: tuple[str, ...]
) -> Iterator[study.Row]:
    """Paired differences of layer means, query by query, over the layers that both have."""
    pairs = list(COMPARED)
    for way in ways:
        pairs += [(f"{way}/", f"{way}/{control}") for control in CONTROLS if control]
        pairs.append((f"{way}/", "noise/"))
    for measure in ("aou", "amd"):
        for of, over in pairs:
            if gaps := _gaps(cells, f"{measure}/{of}", f"{measure}/{over}"):
                row = mean_of(list(map(layer_mean, gaps)))
                yield {**place, "measure": measure, "of": of, "over": over, **row}


def _layer_leads(cells: list[dict[str, Tensor]], place: study.Row) -> Iterator[study.Row]:
    """Layer-causal minus plain gradient descent at every layer."""
    for measure in ("aou", "amd"):
        if gaps := _gaps(cells, f"{measure}/lcgd-logit/", f"{measure}/gd/"):
            for layer, one in enumerate(nested_means(gaps), start=1):
                yield {**place, "measure": measure, "layer": layer, **one.to_dict()}


def _untrained_leads(cells: list[dict[str, Tensor]], place: study.Row) -> Iterator[study.Row]:
    """SimAOU with untrained blocks minus that of the trained model, query by query."""
    if gaps := _gaps(cells, "aou/gd/untrained", "aou/gd/"):
        yield {**place, **mean_of(list(map(layer_mean, gaps)))}


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
            closer = "" if gap is None else f" Layer-causal minus plain: {interval(gap, '+.3f')}."
            yield study.Finding(
                f"{panel(result, task)}: mean {MEASURES[measure]} {words}.{closer}",
                under=measure,
                headline=measure == "aou" and task in working(result),
            )
        before = mean(result, task, "am", "zero-shot")
        control = mean(result, task, "aou", "gd", "untrained")
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


by_control = partial(
    by_task,
    "similarity",
    x="value",
    y="control",
    line="{way}",
    measure="aou",
    seed=None,
    layer=None,
)


def _by_layer(measure: str, how: str) -> study.Figure:
    return figure(
        measure,
        f"{MEASURES[measure]} by layer",
        how,
        by_task(
            "similarity",
            line="{way}",
            way=ALL_LINES,
            measure=measure,
            control="",
            seed=None,
            layer=study.KNOWN,
        ),
        x=study.Axis("block", "layer"),
        y=study.Axis(MEASURES[measure]),
        lines=ALL_LINES,
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
    shows=(
        *over_seeds(*CLAIMS),
        _by_layer(
            "aou",
            "The cosine of what context changes in the output of attention at the last token "
            "of a query, and of what training changes there. Outputs are normalised first.",
        ),
        _by_layer(
            "amd",
            "The cosine of what context changes in the attention scores of the last token on "
            "the query's tokens, and of what training changes there; mean over heads. With rotary "
            "positions, context changes no score in the first block.",
        ),
        _by_layer(
            "am",
            "The cosine of the scores themselves, as in earlier work. It compares what is mostly "
            "the same before any learning.",
        ),
        figure(
            "controls",
            "SimAOU and its controls",
            "The mean over layers. Untrained blocks: the same with random weights inside the "
            "blocks, other ones for every seed. Shuffled answers: trained on the same answers "
            "dealt out anew, none of them right if possible, or of classes as many as by chance. "
            "Other queries: the training's change of another query.",
            by_control(
                way=("gd", "lcgd-logit"),
                control=("", "untrained", "labels", "queries"),
                words={**PANELS, "control": {**CONTROLS, "": "as it is"}},
            )
            + by_control(way="noise", words={**PANELS, "control": {"": "noise"}}),
            kind="dots",
            x=study.Axis("SimAOU, mean over layers"),
            y=study.Axis("", "category"),
            lines=ALL_LINES,
            dodge=True,
        ),
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
            (Column("task"), Column("way", "trained by"), Column("control")),
            across="measure",
            cells=(estimate("value", "", "{:.3f}"),),
            terminal=True,
        ),
        study.Table(
            "leads-table",
            "Differences, query by query",
            pick("similarity_leads", words={"measure": MEASURES, "of": CASES, "over": CASES}),
            (
                Column("task"),
                Column("measure"),
                Column("of"),
                Column("over", "minus"),
                estimate("value", "difference", "{:+.3f}"),
                Column("rows", "queries", "{:,.0f}"),
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
            (Column("task"), Column("seed")),
            across="way",
            cells=(estimate("value", "", "{:.3f}"),),
        ),
    ),
)


def _shots(context: IclContext) -> study.Tables:
    """Similarity at every stop of every training, mean over layers."""
    rows: list[study.Row] = []
    stops = context.settings.stops
    for task, cells in context.cells():
        for way in context.settings.ways:
            for stop in stops:
                for measure in ("aou", "amd"):
                    groups = merged(cells, f"shots/{stop}/{way}/{measure}")
                    if stop == stops[-1]:
                        whole = merged(cells, f"{measure}/{way}/")
                        groups = [layer_mean(group)[:CURVE_QUERIES] for group in whole]
                    if groups:
                        place = {"task": task, "way": way, "shots": stop, "measure": measure}
                        rows.append({**place, **mean_of(groups, DIFFERENCE)})
    return {"shots": rows}


def _shots_findings(result: StudyResult) -> Iterator[study.Said]:
    """Whether similarity grows with demonstrations."""
    for task in names(result):
        rows = result.rows("shots", task=task, measure="aou", value=study.KNOWN)
        words = []
        for way, name in NAMES.items():
            values = [row["value"] for row in rows if row["way"] == way]
            if len(values) > 1:
                words.append(f"{values[0]:.3f} to {values[-1]:.3f} ({name})")
        if words:
            first, last = rows[0]["shots"], max(row["shots"] for row in rows)
            yield (
                f"{panel(result, task)}: from {first} to {last} demonstrations, SimAOU goes from "
                f"{', '.join(words)}."
            )


SHOTS = study.Section(
    key="shots",
    title="Does it grow with demonstrations?",
    run=_shots,
    needs=("learns",),
    short="Demonstrations",
    help="similarity by number of demonstrations",
    lead="Training makes one pass over the demonstrations, so what it has learned after the first "
    "few can be compared with showing the same few.",
    findings=_shots_findings,
    shows=(
        *(
            figure(
                f"shots-{measure}",
                f"{MEASURES[measure]} by number of demonstrations",
                f"Mean over layers, on the first {CURVE_QUERIES} queries of every seed. The "
                "learning rate is the one chosen for all demonstrations.",
                by_task("shots", x="shots", line="{way}", measure=measure),
                x=study.Axis("demonstrations"),
                y=study.Axis(MEASURES[measure]),
            )
            for measure in ("aou", "amd")
        ),
        study.Table(
            "shots-table",
            "Similarity by number of demonstrations, mean over layers",
            pick("shots", words={"measure": MEASURES, "way": NAMES}),
            (Column("task"), Column("shots", "demonstrations")),
            across="{measure}, {way}",
            cells=(estimate("value", "", "{:.3f}"),),
        ),
    ),
)
