"""Section "sizes": the same curves for several models, by relative depth."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, groupby
from operator import itemgetter

import numpy

from layerleap import StudyResult, load, study
from layerleap.errors import BadSettings
from layerleap.lens import finite
from layerleap.study import Page, between, difference, opposite, percent, share_of, short
from layerleap_papers.jump_to_conclusions import curves
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

PAGE = Page(__file__)
CLOSE = 0.1  # curves that are less apart count as the same


def run(context: ShortcutContext) -> study.Tables:
    """Fit and read every model in the same way, maps to the last layer alone.

    A text that suits only the first model is replaced by what suits the others.
    """
    s = context.settings
    if not s.beside:
        raise BadSettings("no models to compare with; name some in the setting 'beside'")
    rows = _curves(context, context.tables["scores"])
    text = None if s.text == replace(s, text=None).main_text(context.model) else s.text
    for model in s.beside:
        if isinstance(model, str):  # one after the other: they are not held in memory together
            model = load(model, dtype=context.model.identity.dtype)
        name = model.identity.name
        if name in {row["model"] for row in rows}:
            raise BadSettings(f"model {name} is given twice; name other models to compare with")
        folder = context.file("beside", name, model.identity.fingerprint)
        folder.mkdir(exist_ok=True)
        settings = replace(s, text=text, other=None, pairs="final", beside=()).resolved(model)
        other = ShortcutContext(model, settings, folder, context.progress)
        scores = other.readings[other.text].scores
        rows += _curves(other, curves.score_rows(scores, other.text, ["-", other.text]))
        context.note(*(f"{name}: {note}" for note in other.notes))
    return {"sizes": rows}


def _curves(context: ShortcutContext, scores: Sequence[study.Row]) -> list[study.Row]:
    """Curves of one model on its main text, with its size."""
    model, text = context.model, context.text
    about = {
        "model": model.identity.name,
        "n_layers": model.n_layers,
        "d_model": model.d_model,
        "parameters": model.identity.parameters,
        "read": text,
    }
    return [
        {**about, **{key: value for key, value in row.items() if key != "fit"}}
        for row in scores
        if row["read"] == text and row["fit"] in ("-", text)
    ]


def _by_model(result: StudyResult) -> dict[str, list[study.Row]]:
    """Agreement through mat, by model."""
    rows = result.rows("sizes", metric="precision@1", map="mat")
    return {model: list(by_layer) for model, by_layer in groupby(rows, itemgetter("model"))}


def findings(result: StudyResult) -> Iterator[study.Said]:
    """Agreement of each model half-way."""
    parts = []
    for model, rows in _by_model(result).items():
        middle = min(rows, key=lambda row: abs(row["layer"] / row["n_layers"] - 0.5))
        parts.append(f"{model} {percent(middle['value'])}")
    yield PAGE.say("sizes", models=", ".join(parts))


def _at(rows: Sequence[study.Row], depth: float) -> study.Row:
    """Value and interval at a relative depth, interpolated between layers."""
    layers = [row["layer"] / row["n_layers"] for row in rows]
    at = {}
    for key in ("value", "low", "high"):
        known = numpy.array([row[key] for row in rows], dtype=float)  # nan for None
        at[key] = finite(float(numpy.interp(depth, layers, known)))
    return at


def _tested(result: StudyResult) -> study.Tested:
    """Whether all curves are close to each other, and how far they are apart."""
    models = _by_model(result).values()
    gaps = [
        difference(_at(first, tenth / 10), _at(second, tenth / 10))
        for first, second in combinations(models, 2)
        for tenth in range(10)
    ]
    same = share_of((between(gap, -CLOSE, CLOSE) for gap in gaps), 1.0)
    apart = max((abs(gap["value"] or 0.0) for gap in gaps), default=0.0)
    answer = opposite(same) if curves.is_masked(result) else same
    return answer, {"n": len(models), "points": 100 * apart}


def _points(result: StudyResult) -> Iterator[study.Row]:
    for row in result.rows("sizes", metric="precision@1"):
        millions = f", {row['parameters'] / 1e6:,.0f} M parameters" if row["parameters"] else ""
        line = f"{short(row['model'])}, {row['n_layers']} layers{millions}"
        depth = row["layer"] / row["n_layers"]
        yield curves.point(row, x=depth, line=line, panel=curves.LENSES[row["map"]].label)


def _table_rows(result: StudyResult) -> Iterator[study.Row]:
    for name in ("mat", "id"):
        for quarter in (1, 2, 3):
            for row in result.rows("sizes", metric="precision@1", map=name):
                if row["layer"] == round(row["n_layers"] * quarter / 4):
                    yield {**row, "column": f"P@1 {name} at {25 * quarter} %"}


SECTION = PAGE.section(
    "sizes",
    run,
    findings=findings,
    shows=(
        PAGE.claim("sizes_next")(_tested),
        PAGE.claim("sizes_masked")(_tested),
        PAGE.figure("sizes", _points),
        PAGE.table("sizes-table", _table_rows),
    ),
    when=lambda s: bool(s.beside),
)
