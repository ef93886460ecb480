"""How well the maps are determined, and checks that any correct run must pass."""

from collections.abc import Iterator
from itertools import pairwise

from layerleap import StudyResult, study
from layerleap.study import Page, percent, pick
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

PAGE = Page(__file__)
LEAST_AGREEMENT = 0.99  # of the tail with the model; rounding may turn near-ties
LAWS = (
    "the tail applied to the last state gives the model's own output on real text",
    "Precision@1 <= Precision@5 <= Precision@10",
    "on the rows it was fitted on, a shortcut is never worse than the identity",
)


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
        for precisions in by.values()
        for a, b in pairwise(precisions[f"precision@{k}"] for k in (1, 5, 10))
    )
    fits = tables["fits"]
    behind = [f for f in fits if f["train_r2"] < f["train_r2_logit"] - 1e-9 and not f["ridge"]]
    tail = tables["tail"]
    tail_holds = all(row["rows"] > 0 and row["agreement"] >= LEAST_AGREEMENT for row in tail)
    laws = (
        (tail_holds, "; ".join(_checked(row) for row in tail)),
        (ordered, "at every layer, for every lens and text"),
        (not behind, f"{len(fits) - len(behind)} of {len(fits)} fits"),
    )
    return [
        {"law": law, "holds": holds, "detail": detail}
        for law, (holds, detail) in zip(LAWS, laws, strict=True)
    ]


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


def findings(result: StudyResult) -> Iterator[study.Said]:
    """Whether the rows determine the maps."""
    finals = _finals(result)
    deficient = [row for row in finals if row["rank"] < row["width"]]
    if deficient:
        yield PAGE.say("deficient", deficient=len(deficient), n=len(finals), first=finals[0])
    known = [row for row in finals if row["condition"] is not None]
    if known:
        yield PAGE.say("condition", worst=max(known, key=lambda row: row["condition"]))


def _conditions(result: StudyResult) -> Iterator[study.Row]:
    for row in _finals(result):
        point = {"x": row["src"], "y": row["condition"], "rows": row["rows"]}
        yield {**point, "line": "condition"}
        if row["rank"] < row["width"]:
            yield {**point, "line": "deficient"}


SHOWS = (
    PAGE.figure("fit", _conditions),
    PAGE.table("fits-table", _finals),
    PAGE.table("laws-table", pick("laws")),
)
