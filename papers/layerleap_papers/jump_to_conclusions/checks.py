"""How well the maps are determined, and checks that any correct run must pass."""

from collections.abc import Iterator
from itertools import pairwise

from layerleap import StudyResult, study
from layerleap.study import percent, pick
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

LEAST_AGREEMENT = 0.99  # of the tail with the model; rounding may turn near-ties


def tables(context: ShortcutContext) -> study.Tables:
    """How each map was fitted, and whether the tail gives the model's own output."""
    last, bank = context.model.n_layers, context.bank
    deficient = [fit for fit in bank.fits.values() if fit.dst == last and fit.is_deficient]
    if deficient:
        context.note(
            f"{len(deficient)} of {last} maps to the last layer were fitted on fewer independent "
            f"rows than the {bank.d_model} that they need, so shortcuts may look worse here than "
            "they are: fit on more texts before you trust a verdict."
        )
    return {
        "fits": [fit.to_dict() for fit in bank.fits.values()],
        "tail": [
            {"text": text, **read.scores.check.to_dict()} for text, read in context.readings.items()
        ],
    }


def laws(tables: study.Tables) -> list[study.Row]:
    """What must hold whatever the data, and whether it does."""
    by: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in tables["scores"]:
        if row["metric"].startswith("precision"):
            key = row["fit"], row["read"], row["layer"]
            by.setdefault(key, {})[row["metric"]] = row["value"]
    ordered = all(
        a <= b
        for found in by.values()
        for a, b in pairwise(found[f"precision@{k}"] for k in (1, 5, 10))
    )
    fits = tables["fits"]
    behind = [f for f in fits if f["train_r2"] < f["train_r2_logit"] - 1e-9 and not f["ridge"]]
    tail = tables["tail"]
    tail_holds = all(row["rows"] > 0 and row["agreement"] >= LEAST_AGREEMENT for row in tail)
    laws = (
        (
            "the tail applied to the last state gives the model's own output on real text",
            tail_holds,
            "; ".join(_checked(row) for row in tail),
        ),
        (
            "Precision@1 <= Precision@5 <= Precision@10",
            ordered,
            "at every layer, for every lens and text",
        ),
        (
            "on the rows it was fitted on, a shortcut is never worse than the identity",
            not behind,
            f"{len(fits) - len(behind)} of {len(fits)} fits",
        ),
    )
    return [dict(zip(("law", "holds", "detail"), law, strict=True)) for law in laws]


def _checked(row: study.Row) -> str:
    if not row["rows"]:
        return f"{row['text']}: no row was checked"
    gap = "not finite" if row["gap"] is None else f"at most {row['gap']:.1e}"
    return (
        f"{row['text']}: the same top token in {percent(row['agreement'], 1)} of {row['rows']:,} "
        f"rows, log-probabilities differ by {gap}"
    )


def _finals(result: StudyResult) -> list[study.Row]:
    return sorted(result.rows("fits", dst=result.model["n_layers"]), key=lambda row: row["src"])


def findings(result: StudyResult) -> Iterator[study.Finding]:
    """Whether the rows determine the maps."""
    finals = _finals(result)
    deficient = [row for row in finals if row["rank"] < row["width"]]
    if deficient:
        yield study.Finding(
            f"{len(deficient)} of {len(finals)} fits to the last layer are rank-deficient: "
            f"{finals[0]['rows']} rows do not determine {finals[0]['width']} directions, so the "
            "minimum-norm solution was used. Fit on more text.",
            under="fit",
        )
    known = [row for row in finals if row["condition"] is not None]
    if known:
        worst = max(known, key=lambda row: row["condition"])
        yield study.Finding(
            f"The worst-conditioned source is layer {worst['src']}: the singular values of its "
            f"rows differ by a factor of {worst['condition']:.1e} ({worst['rows']} rows, width "
            f"{worst['width']}).",
            under="fit",
        )


def _conditions(result: StudyResult) -> Iterator[study.Row]:
    for row in _finals(result):
        point = {"x": row["src"], "y": row["condition"], "rows": row["rows"]}
        yield {**point, "line": "condition"}
        if row["rank"] < row["width"]:
            yield {**point, "line": "deficient"}


FIGURES = (
    study.Figure(
        "fit",
        "Condition of the fits",
        "Condition number by source layer: how unevenly the source states fill their directions. "
        "The higher it is, the less the weakest directions of a map can be trusted.",
        _conditions,
        x=study.Axis("from layer (to the last)", "layer"),
        y=study.Axis("condition number", "log"),
        lines={
            "condition": study.Line("condition number", "black"),
            "deficient": study.Line("rank below the width", "orange", "o", "points"),
        },
        size=(7.2, 3.3),
        unit="states per fit",
        sample="a property of the fit, so without interval",
    ),
)

TABLES = (
    study.Table(
        "fits-table",
        "Fits to the last layer",
        _finals,
        (
            study.Column("src", "from"),
            study.Column("dst", "to"),
            study.Column("rows", form="{:,.0f}"),
            study.Column("rank", form="{:.0f}"),
            study.Column("width", form="{:.0f}"),
            study.Column("condition", form="{:.1e}"),
            study.Column("ridge", form="{:g}"),
            study.Column("train_r2", "train R\u00b2 mat", "{:.3f}"),
            study.Column("train_r2_logit", "train R\u00b2 id", "{:.3f}"),
        ),
    ),
    study.Table(
        "laws-table",
        "Checks that any correct run passes",
        pick("laws"),
        (
            study.Column("law", "check"),
            study.Column(
                "holds",
                "result",
                words={True: "holds", False: "FAILS"},
                colours={True: "good", False: "bad"},
            ),
            study.Column("detail"),
        ),
    ),
)
