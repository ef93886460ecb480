"""Section "sizes": the same curves for several models, by relative depth.

In: models to compare with. Out: table "sizes", and what it shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from layerleap.errors import BadSettings
from layerleap.models.load import load
from layerleap.stream.source import default_text
from layerleap.study.claims import Answer, Claim, Verdict, between, difference, opposite, share_of
from layerleap.study.engine import Section
from layerleap.study.figures import LENSES, Axis, Figure, short
from layerleap.study.result import Finding, Row, StudyResult, Tables
from layerleap.study.shortcuts.context import ShortcutContext
from layerleap.study.shortcuts.curves import METRICS, SAMPLE, is_masked, is_next, score_rows
from layerleap.study.tables import Column, Table, estimate, percent

CLOSE = 0.1  # curves that are less apart count as the same


def run(context: ShortcutContext) -> Tables:
    """Fit and read every model in the same way, maps to the last layer alone.

    A text that suits only the first model is replaced by what suits the others.
    """
    s = context.settings
    if not s.beside:
        raise BadSettings("no models to compare with; name some in the setting 'beside'")
    rows = _curves(context, context.tables["scores"])
    text = None if s.text == default_text(context.model) else s.text
    for model in s.beside:
        if isinstance(model, str):  # one after the other: they are not held in memory together
            model = load(model, dtype=context.model.identity.dtype)
        name = model.identity.name
        if name in {row["model"] for row in rows}:
            raise BadSettings(f"model {name} is given twice; name other models to compare with")
        folder = context.file("beside", name, model.identity.fingerprint)
        folder.mkdir(exist_ok=True)
        own = replace(s, text=text, other=None, pairs="final", beside=()).resolved(model)
        other = ShortcutContext(model, own, folder, context.progress)
        scores = other.readings[other.text].scores
        rows += _curves(other, score_rows(scores, other.text, ["-", other.text]))
        context.note(*(f"{name}: {note}" for note in other.notes))
    return {"sizes": rows}


def _curves(context: ShortcutContext, scores: Sequence[Row]) -> list[Row]:
    """Curves of one model on its main text, with its size."""
    model, text = context.model, context.text
    about = {
        "model": model.identity.name, "n_layers": model.n_layers, "d_model": model.d_model,
        "parameters": model.identity.parameters, "read": text,
    }  # fmt: skip
    keys = ("map", "layer", "metric", *SAMPLE)
    return [
        {**about, **{key: row[key] for key in keys}}
        for row in scores
        if row["read"] == text and row["fit"] in ("-", text) and row["metric"] in METRICS
    ]


def _by_model(result: StudyResult) -> dict[str, list[Row]]:
    """Agreement through mat, by model."""
    by: dict[str, list[Row]] = {}
    for row in result.rows("sizes", metric="precision@1", map="mat"):
        by.setdefault(row["model"], []).append(row)
    return by


def findings(result: StudyResult) -> Iterator[Finding]:
    """Agreement of each model half-way."""
    parts = []
    for model, rows in _by_model(result).items():
        middle = min(rows, key=lambda row: abs(row["layer"] / row["n_layers"] - 0.5))
        parts.append(f"{model} {percent(middle['value'])}")
    text = f"Agreement through shortcuts at half of the depth: {', '.join(parts)}."
    yield Finding(text, under="sizes")


def _at(rows: Sequence[Row], depth: float) -> Row:
    """Value and interval at a relative depth, interpolated between layers."""
    ordered = sorted(rows, key=lambda row: row["layer"])
    for a, b in pairwise(ordered):
        first, second = (row["layer"] / row["n_layers"] for row in (a, b))
        if first <= depth <= second:
            part = (depth - first) / (second - first)
            keys = ("value", "low", "high")
            if None in [row[key] for row in (a, b) for key in keys]:
                return {"value": a["value"], "low": None, "high": None}
            return {key: a[key] + (b[key] - a[key]) * part for key in keys}
    return {"value": 0.0, "low": None, "high": None}


def _same(result: StudyResult) -> tuple[Answer, str]:
    """Whether all curves are close to each other, and how far they are apart."""
    answers: list[Answer] = []
    apart = 0.0
    for first, second in combinations(_by_model(result).values(), 2):
        for tenth in range(10):
            gap = difference(_at(first, tenth / 10), _at(second, tenth / 10))
            apart = max(apart, abs(gap["value"] or 0.0))
            answers.append(between(gap, -CLOSE, CLOSE))
    seen = f"the curves of {len(_by_model(result))} models are up to {100 * apart:.0f} points apart"
    return share_of(answers, 1.0), seen


WHY = (
    "the same: the interval of every difference between two models, at every tenth of the depth, "
    "is below 10 points; whether the models are one family is for the reader to say"
)


def _verdict(result: StudyResult) -> Verdict:
    answer, seen = _same(result)
    return Verdict(opposite(answer) if is_masked(result) else answer, seen, WHY)


CLAIMS = (
    Claim("Next-token models of different size have the same curve over relative depth.", _verdict,
          is_next),
    Claim("Masked models of different size have different curves over relative depth.", _verdict,
          is_masked),
)  # fmt: skip


def _points(result: StudyResult) -> Iterator[Row]:
    for row in result.rows("sizes", metric="precision@1"):
        millions = f", {row['parameters'] / 1e6:,.0f} M parameters" if row["parameters"] else ""
        yield {
            "x": row["layer"] / row["n_layers"], "y": row["value"],
            "line": f"{short(row['model'])}, {row['n_layers']} layers{millions}",
            "panel": LENSES[row["map"]].label,
            **{key: row[key] for key in ("low", "high", "rows", "documents")},
        }  # fmt: skip


FIGURES = (
    Figure(
        "sizes", "Agreement by relative depth",
        "One colour per model. If the curves lie together, models of different depth can be read "
        "equally well after the same share of their layers.",
        _points, x=Axis("share of the model's layers already run", "share"),
        y=Axis("agreement", "share"), size=(4.8, 4.2),
    ),
)  # fmt: skip


def _table_rows(result: StudyResult) -> Iterator[Row]:
    for name in ("mat", "id"):
        for quarter in (1, 2, 3):
            for row in result.rows("sizes", metric="precision@1", map=name):
                if row["layer"] == round(row["n_layers"] * quarter / 4):
                    yield {**row, "column": f"P@1 {name} at {25 * quarter} %"}


TABLES = (
    Table(
        "sizes-table", "Agreement (%) by relative depth", _table_rows,
        (Column("model"), Column("parameters", form="{:,.0f}"), Column("n_layers", "layers"),
         Column("d_model", "width")),
        across="column", cells=(estimate("value", "", "{:.1f}", 100),),
    ),
)  # fmt: skip

SECTION = Section(
    "sizes", "Models of several sizes", run,
    lead="The same reading of several models, laid over each other by relative depth.",
    short="Sizes", help="other models, named by --beside", findings=findings, claims=CLAIMS,
    figures=FIGURES, tables=TABLES, needs=("readings",), when=lambda s: bool(s.beside),
)  # fmt: skip
