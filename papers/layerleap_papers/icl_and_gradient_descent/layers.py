"""Do layers predict the same after training as in context?

In: the token that every layer would predict, read through lenses, in every condition. Out: how
often two conditions agree at each layer, and how far apart their saturation layers are.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.act.learning import saturation_layer, shuffled
from layerleap.lens import nested_means
from layerleap.study import estimate, part_of, pick, points
from layerleap_papers.icl_and_gradient_descent.claims import Judged, interval
from layerleap_papers.icl_and_gradient_descent.conditions import READ_QUERIES
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import PANELS, names, panel
from layerleap_papers.icl_and_gradient_descent.icl_context import IclContext, merged
from layerleap_papers.icl_and_gradient_descent.rates import NAMES
from layerleap_papers.icl_and_gradient_descent.seeds import over_seeds
from layerleap_papers.icl_and_gradient_descent.similarity import ALL_LINES, SAMPLE

CONTROLS = {"": "", "labels": "shuffled answers", "queries": "other queries"}
CONTROLS_HERE = (
    "Controls: readings after training on shuffled answers, for the paper's two ways alone, "
    "because it costs another training; and readings of another query. Noise is no state that a "
    "lens could read, and layers of untrained blocks predict at random, so neither is a control "
    "here."
)
LENSES = {"logit": "the logit lens", "linear": "shortcuts", "tuned": "tuned maps"}


def tables(context: IclContext) -> study.Tables:
    """Agreement with the readings in context, by layer, and saturation layers."""
    agreement: list[study.Row] = []
    saturation: list[study.Row] = []
    for task, cells in context.cells():
        for lens in context.settings.lenses:
            shown = merged(cells, f"tops/{lens}/in-context")
            plain = merged(cells, f"tops/{lens}/zero-shot")
            for case in ("zero-shot", *context.settings.ways):
                for control in CONTROLS:
                    own = _case(cells, f"tops/{lens}/{case}", control, context.seeds)
                    if own:
                        place = {"task": task, "lens": lens, "case": case, "control": control}
                        agreement += _agreement(own, shown, plain, place)
                        saturation.append({**place, **_saturation(own, shown)})
    return {"readings": agreement, "saturation_gaps": saturation}


def _case(cells: list[dict[str, Tensor]], key: str, control: str, seeds: list[int]) -> list[Tensor]:
    """Readings after one way of training, or of its control; empty if there are none."""
    own = merged(cells, f"{key}/labels" if control == "labels" else key)
    if control != "queries":
        return own
    return [one[shuffled(len(one), seed)] for one, seed in zip(own, seeds, strict=False)]


def _agreement(
    own: list[Tensor], shown: list[Tensor], plain: list[Tensor], place: study.Row
) -> Iterator[study.Row]:
    """By layer; the lead is over zero-shot, query by query."""
    same = [(a == b).double() for a, b in zip(own, shown, strict=True)]
    before = [(a == b).double() for a, b in zip(plain, shown, strict=True)]
    columns = [_with_mean(one) for one in same]
    gaps = [_with_mean(a - b) for a, b in zip(same, before, strict=True)]
    last = columns[0].shape[1] - 1
    pairs = zip(
        nested_means(columns, bounds=(0, 1)), nested_means(gaps, bounds=(-1, 1)), strict=True
    )
    for column, (one, gap) in enumerate(pairs):
        lead = {f"lead_{key}": getattr(gap, key) for key in ("value", "low", "high")}
        yield {**place, "layer": None if column == last else column, **one.to_dict(), **lead}


def _with_mean(values: Tensor) -> Tensor:
    """The values by layer, and their mean over blocks.

    Layer 0 is the embedding of the query's last token. Without absolute positions it is the same in
    all conditions, so it agrees whatever was learned.
    """
    return torch.cat([values, values[:, 1:].mean(1, keepdim=True)], 1)


def _saturation(own: list[Tensor], shown: list[Tensor]) -> study.Row:
    """The mean distance of saturation layers, in layers."""
    gaps = [
        torch.tensor(
            [
                [float(abs(saturation_layer(x) - saturation_layer(y)))]
                for x, y in zip(a, b, strict=True)
            ]
        )
        for a, b in zip(own, shown, strict=True)
    ]
    return nested_means(gaps, bounds=(0, math.inf))[0].to_dict()


def findings(result: StudyResult) -> Iterator[study.Said]:
    """Per task, through the logit lens."""
    for task in names(result):
        rows = {
            row["case"]: row
            for row in result.rows("readings", task=task, lens="logit", layer=None, control="")
        }
        known = [case for case in ("zero-shot", *NAMES) if case in rows]
        if known:
            words = ", ".join(
                f"{interval(rows[case], '.2f')} {NAMES.get(case, 'without training')}"
                for case in known
            )
            yield (
                f"{panel(result, task)}: share of layers whose prediction is that in context, "
                f"through the logit lens: {words}."
            )


def _claim(way: str) -> study.Claim:
    def find(result: StudyResult, task: str) -> study.Row | None:
        where = {"task": task, "lens": "logit", "case": way, "layer": None, "control": ""}
        row = result.row("readings", **where)
        return None if row is None else part_of(row, "lead")

    return study.Claim(
        f"After training by {NAMES[way]}, layers predict more as they do in context than before "
        "(not in the paper).",
        Judged(
            find,
            "mean over layers, minus zero-shot: yes if the interval is above 0 on all tasks that "
            "are learned in context",
            ways=(way,),
        ),
    )


FIGURES = (
    study.Figure(
        "readings",
        "Layers that predict as in context",
        "The share of queries for which a layer predicts the same token as that layer in context, "
        f"read through the logit lens, for the first {READ_QUERIES} queries of every seed.",
        points(
            "readings",
            line="{case}",
            panel="{task}",
            words=PANELS,
            lens="logit",
            control="",
            layer=study.KNOWN,
        ),
        y=study.Axis("same prediction", "share"),
        lines=ALL_LINES,
        unit="queries",
        sample=SAMPLE,
    ),
)


WORDS = {
    "case": {**NAMES, "zero-shot": "without training"},
    "lens": LENSES,
    "control": CONTROLS,
}
TABLES = (
    study.Table(
        "readings-table",
        "Layers that predict as in context (%), mean over blocks",
        pick("readings", words=WORDS, layer=None),
        (study.Column("task"), study.Column("lens", "read through"), study.Column("control")),
        across="case",
        cells=(estimate("value", "", "{:.0f}", 100),),
    ),
    study.Table(
        "saturation-table",
        "Distance of saturation layers from those in context, in layers",
        pick("saturation_gaps", words=WORDS),
        (study.Column("task"), study.Column("lens", "read through"), study.Column("control")),
        across="case",
        cells=(estimate("value", "", "{:.1f}"),),
    ),
)

SECTION = study.Section(
    key="layers",
    title="Do layers predict the same?",
    run=tables,
    needs=("learns",),
    help="readings of layers and saturation",
    lead="A lens reads what every layer would predict. After training, do layers predict what they "
    "predict in context, and do predictions settle at the same layer? " + CONTROLS_HERE,
    findings=findings,
    shows=(*over_seeds(_claim("gd"), _claim("lcgd-logit")), *FIGURES, *TABLES),
)
