"""R2 between all pairs of layers: how well a later state can be predicted from an earlier one."""

from collections.abc import Iterator
from functools import partial

from layerleap import StudyResult, study
from layerleap.study import Page, above, at_every, below, pick, share_of, untested
from layerleap_papers.jump_to_conclusions.curves import LENSES
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

PAGE = Page(__file__)
NO_R2 = "no pair of layers has an R2 here: too few rows were read"


def tables(context: ShortcutContext) -> study.Tables:
    """R2 of mat and of id, and the difference of both."""
    reading = context.readings[context.text]
    return {"r2": reading.r2, "r2_lead": reading.r2_lead}


def _by_pair(result: StudyResult) -> dict[str, dict[tuple[int, int], float]]:
    """R2 by map and pair; one row has no spread, so no R2, and is left out."""
    return {
        name: {
            (row["src"], row["dst"]): row["r2"]
            for row in result.rows("r2", map=name, r2=study.KNOWN)
        }
        for name in ("mat", "id")
    }


def findings(result: StudyResult) -> Iterator[study.Said]:
    """What R2 says."""
    by, last = _by_pair(result), result.model["n_layers"]
    pairs = sorted(by["mat"].keys() & by["id"].keys())
    if not pairs:
        return
    wins = sum(by["mat"][pair] > by["id"][pair] for pair in pairs)
    yield PAGE.say("r2", wins=wins, n=len(pairs))
    steps = [pair for pair in pairs if pair[1] - pair[0] == 1]
    if steps and (0, last) in pairs:
        mat, plain = (sum(by[name][p] for p in steps) / len(steps) for name in ("mat", "id"))
        whole = {"mat_whole": by["mat"][0, last], "plain_whole": by["id"][0, last]}
        yield PAGE.say("r2_steps", mat=mat, plain=plain, **whole)
    keys = ("r2", "weighted", "no_first")
    finals = [[row[key] for key in keys] for row in result.rows("r2", map="mat", dst=last)]
    if known := [means for means in finals if None not in means]:
        means = [sum(column) / len(known) for column in zip(*known, strict=True)]
        yield PAGE.say("r2_last", **dict(zip(keys, means, strict=True)))


@PAGE.claim("explains_more")
def _explains_more(result: StudyResult) -> study.Tested:
    answers = [above(row) for row in result.rows("r2_lead", value=study.KNOWN)]
    if not answers:
        return untested(NO_R2)
    failing = sum(value <= 0 for value in _by_pair(result)["id"].values())
    return at_every(answers), {"yes": answers.count("yes"), "n": len(answers), "failing": failing}


def _cells(result: StudyResult) -> Iterator[study.Row]:
    for name in ("mat", "id"):
        rows = result.rows("r2", map=name, r2=study.KNOWN)
        below_zero = sum(row["r2"] < 0 for row in rows)
        note = f"{below_zero:,} of {len(rows):,} pairs\nbelow 0, shown as 0" if below_zero else ""
        for row in rows:
            place = {"x": row["src"], "y": row["dst"], "value": row["r2"]}
            yield {**row, **place, "panel": LENSES[name].label, "note": note}


SHOWS = (
    _explains_more,
    PAGE.each(
        "r2_masked",
        pick("r2", map="id", r2=study.KNOWN),
        below,
        partial(share_of, needed=0.5),
    ),
    PAGE.figure("r2", _cells),
)
