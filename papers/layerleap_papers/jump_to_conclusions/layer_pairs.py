"""R2 between all pairs of layers: how well a later state can be predicted from an earlier one."""

from collections.abc import Iterator
from functools import partial

from layerleap import StudyResult, study
from layerleap.lens import GROUPS
from layerleap.study import above, at_every, below, pick, share_of, untested
from layerleap_papers.jump_to_conclusions.curves import LENSES, is_masked
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext


def tables(context: ShortcutContext) -> study.Tables:
    """R2 of mat and of id, and the difference of both."""
    reading = context.readings[context.text]
    return {"r2": reading.r2, "r2_lead": reading.r2_lead}


def _by_pair(result: StudyResult) -> dict[str, dict[tuple[int, int], float]]:
    """R2 by map and pair; one row has no spread, so no R2, and is left out."""
    by: dict[str, dict[tuple[int, int], float]] = {"mat": {}, "id": {}}
    for row in result.rows("r2"):
        if row["r2"] is not None:
            by[row["map"]][row["src"], row["dst"]] = row["r2"]
    return by


NO_R2 = "no pair of layers has an R2 here: too few rows were read"


def findings(result: StudyResult) -> Iterator[study.Finding]:
    """What R2 says."""
    by, last = _by_pair(result), result.model["n_layers"]
    pairs = sorted(by["mat"].keys() & by["id"].keys())
    if not pairs:
        return
    wins = sum(by["mat"][pair] > by["id"][pair] for pair in pairs)
    yield study.Finding(
        f"The shortcut explains more of the later state than the earlier state does unchanged, in "
        f"{wins} of {len(pairs)} pairs of layers (held-out R2, averaged over coordinates).",
        under="r2",
    )
    steps = [pair for pair in pairs if pair[1] - pair[0] == 1]
    whole = (0, last)
    if steps and whole in pairs:
        mat, plain = (sum(by[name][p] for p in steps) / len(steps) for name in ("mat", "id"))
        yield study.Finding(
            f"Over one layer, the mean R2 is {mat:.2f} with shortcuts and {plain:.2f} without. "
            f"Over the whole network it is {by['mat'][whole]:.2f} and {by['id'][whole]:.2f}.",
            under="r2",
        )
    keys = ("r2", "weighted", "no_first")
    finals = [[row[key] for key in keys] for row in result.rows("r2", map="mat", dst=last)]
    if known := [own for own in finals if None not in own]:
        plain, weighted, later = (sum(column) / len(known) for column in zip(*known, strict=True))
        yield study.Finding(
            f"To the last layer, the mean over sources is {plain:.2f}. It is {weighted:.2f} if "
            f"coordinates are weighted by their variance, and {later:.2f} without first positions, "
            "whose states are often outliers.",
            under="r2",
        )


@study.claim("Between all pairs of layers, a shortcut explains more than the state itself (R2).")
def _explains_more(result: StudyResult) -> study.Verdict:
    answers = [above(row) for row in result.rows("r2_lead", value=study.KNOWN)]
    if not answers:
        return untested(NO_R2)
    failing = sum(value <= 0 for value in _by_pair(result)["id"].values())
    return study.Verdict(
        at_every(answers),
        f"clearly in {answers.count('yes')} of {len(answers)} pairs; without a map, R2 is 0 or "
        f"below in {failing}",
        "yes if the interval of the difference says so for all pairs, partly if for most",
    )


CLAIMS = (
    _explains_more,
    study.Claim(
        "Without a map, R2 of a masked model is no better than the mean for most pairs of layers.",
        study.Each(
            pick("r2", map="id", r2=study.KNOWN),
            "R2 is clearly below 0 in {yes} of {n} pairs",
            "yes if the interval says so in half of the pairs or more",
            below,
            partial(share_of, needed=0.5),
            NO_R2,
        ),
        is_masked,
    ),
)


def _cells(result: StudyResult) -> Iterator[study.Row]:
    for name in ("mat", "id"):
        rows = result.rows("r2", map=name, r2=study.KNOWN)
        below_zero = sum(row["r2"] < 0 for row in rows)
        note = f"{below_zero:,} of {len(rows):,} pairs\nbelow 0, shown as 0" if below_zero else ""
        for row in rows:
            place = {"x": row["src"], "y": row["dst"], "value": row["r2"]}
            yield {**row, **place, "panel": LENSES[name].label, "note": note}


FIGURES = (
    study.Figure(
        "r2",
        "Fit between layers",
        "R\u00b2 on held-out documents for every pair of layers, averaged over coordinates: 1 is a "
        "perfect prediction, 0 is no better than the mean. Values below 0 are shown as 0.",
        _cells,
        "heatmap",
        x=study.Axis("from layer"),
        y=study.Axis("to layer"),
        value=study.Axis("R\u00b2 (below 0 shown as 0)", low=0, high=1),
        size=(4.4, 4.4),
        sample=f"95 % intervals are in r2.csv: over documents, or over {GROUPS} groups "
        f"of them if there are more than {GROUPS}",
    ),
)
