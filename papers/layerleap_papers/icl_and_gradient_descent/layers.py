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
from layerleap.lens import DIFFERENCE, SHARE, nested_means
from layerleap.study import Column, estimate, part_of, pick
from layerleap_papers.icl_and_gradient_descent.claims import Judged, interval
from layerleap_papers.icl_and_gradient_descent.conditions import READ_QUERIES
from layerleap_papers.icl_and_gradient_descent.icl_accuracy import (
    by_task,
    figure,
    names,
    over_seeds,
    panel,
)
from layerleap_papers.icl_and_gradient_descent.icl_context import NAMES, IclContext, mean_of, merged
from layerleap_papers.icl_and_gradient_descent.similarity import ALL_LINES

WORDS = {
    "case": {**NAMES, "zero-shot": "without training"},
    "lens": {"logit": "the logit lens", "linear": "shortcuts", "tuned": "tuned maps"},
    "control": {"": "", "labels": "shuffled answers", "queries": "other queries"},
}


def tables(context: IclContext) -> study.Tables:
    """Agreement with the readings in context, by layer, and saturation layers."""
    agreement, saturation = list[study.Row](), list[study.Row]()
    for task, cells in context.cells():
        for lens in context.settings.lenses:
            shown = merged(cells, f"tops/{lens}/in-context")
            plain = merged(cells, f"tops/{lens}/zero-shot")
            for case in ("zero-shot", *context.settings.ways):
                for control in WORDS["control"]:
                    suffix = "/labels" if control == "labels" else ""
                    tops = merged(cells, f"tops/{lens}/{case}{suffix}")
                    if control == "queries":
                        pairs = zip(tops, context.seeds, strict=False)
                        tops = [top[shuffled(len(top), seed)] for top, seed in pairs]
                    if tops:
                        place = {"task": task, "lens": lens, "case": case, "control": control}
                        agreement += _agreement(tops, shown, plain, place)
                        saturation.append({**place, **_saturation(tops, shown)})
    return {"readings": agreement, "saturation_gaps": saturation}


def _agreement(
    tops: list[Tensor], shown: list[Tensor], plain: list[Tensor], place: study.Row
) -> Iterator[study.Row]:
    """By layer; the lead is over zero-shot, query by query."""
    same = [(a == b).double() for a, b in zip(tops, shown, strict=True)]
    before = [(a == b).double() for a, b in zip(plain, shown, strict=True)]
    gaps = [_with_mean(a - b) for a, b in zip(same, before, strict=True)]
    means = nested_means(list(map(_with_mean, same)), bounds=SHARE)
    leads = nested_means(gaps, bounds=DIFFERENCE)
    layers = [*range(len(means) - 1), None]
    for layer, one, gap in zip(layers, means, leads, strict=True):
        lead = {f"lead_{key}": getattr(gap, key) for key in ("value", "low", "high")}
        yield {**place, "layer": layer, **one.to_dict(), **lead}


def _with_mean(values: Tensor) -> Tensor:
    """The values by layer, and their mean over blocks.

    Layer 0 is the embedding of the query's last token. Without absolute positions it is the same in
    all conditions, so it agrees whatever was learned.
    """
    return torch.cat([values, values[:, 1:].mean(1, keepdim=True)], 1)


def _saturation(tops: list[Tensor], shown: list[Tensor]) -> study.Row:
    """The mean distance of saturation layers, in layers."""
    gaps = [
        torch.tensor(
            [abs(saturation_layer(x) - saturation_layer(y)) for x, y in zip(a, b, strict=True)]
        )
        for a, b in zip(tops, shown, strict=True)
    ]
    return mean_of(gaps, (0, math.inf))


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


def _table(key: str, caption: str, form: str, scale: float, rows: study.Pick) -> study.Table:
    return study.Table(
        key,
        caption,
        rows,
        (Column("task"), Column("lens", "read through"), Column("control")),
        across="case",
        cells=(estimate("value", "", form, scale),),
    )


SECTION = study.Section(
    key="layers",
    title="Do layers predict the same?",
    run=tables,
    needs=("learns",),
    help="readings of layers and saturation",
    lead="A lens reads what every layer would predict. After training, do layers predict what they "
    "predict in context, and do predictions settle at the same layer? Controls: readings after "
    "training on shuffled answers, for the paper's two ways alone, because it costs another "
    "training; and readings of another query. Noise is no state that a lens could read, and layers "
    "of untrained blocks predict at random, so neither is a control here.",
    findings=findings,
    shows=(
        *over_seeds(_claim("gd"), _claim("lcgd-logit")),
        figure(
            "readings",
            "Layers that predict as in context",
            "The share of queries for which a layer predicts the same token as that layer in "
            f"context, read through the logit lens, for the first {READ_QUERIES} queries of every "
            "seed.",
            by_task("readings", line="{case}", lens="logit", control="", layer=study.KNOWN),
            y=study.Axis("same prediction", "share"),
            lines=ALL_LINES,
        ),
        _table(
            "readings-table",
            "Layers that predict as in context (%), mean over blocks",
            "{:.0f}",
            100,
            pick("readings", words=WORDS, layer=None),
        ),
        _table(
            "saturation-table",
            "Distance of saturation layers from those in context, in layers",
            "{:.1f}",
            1,
            pick("saturation_gaps", words=WORDS),
        ),
    ),
)
