"""Section "parts": which part of a block can be replaced by a matrix?

Maps of attention, feed-forward networks and norms are fitted in the same pass as the shortcuts.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from layerleap import StudyResult, study
from layerleap.act.edits import PartScores
from layerleap.errors import BadText, ModelRefused
from layerleap.study import Page, percent
from layerleap_papers.jump_to_conclusions import curves
from layerleap_papers.jump_to_conclusions.curves import below_last, both, estimates, values
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

PAGE = Page(__file__)
NAMES = {"attn": "attention", "ffn": "the FFN", "norms": "the norms"}
BIASED_STARTS = 4  # layers from which parts with an intercept are tried: enough to compare


def run(context: ShortcutContext) -> study.Tables:
    """Replace one kind of part from every layer on; with an intercept, from a few layers on."""
    kinds, reason = context.kinds
    if not kinds:
        raise ModelRefused(reason)
    if reason:
        context.note(f"Not all kinds of parts could be replaced: {reason}.")
    fitted, last = context.fitted[context.text], context.model.n_layers
    assert fitted.biased is not None
    starts = sorted({round(n * last / BIASED_STARTS) for n in range(BIASED_STARTS)})
    plain = PartScores(context.model, fitted.bank)
    biased = PartScores(context.model, fitted.biased, starts=starts)
    rows = context.run_again(context.settings.part_texts, "replacing parts", plain.add, biased.add)
    if not plain.has_rows:
        raise BadText("no held-out text was drawn to replace parts in; raise part_texts")
    documents, agrees = plain.agreement()
    jump = context.readings[context.text].scores.rank[context.text][rows] == 0
    return {
        "parts": [
            row
            for bias, scores in ((False, plain), (True, biased))
            for row in scores.table(bias=bias)
        ],
        "part_leads": _leads(documents, agrees, jump),
        "part_steps": _steps(documents, agrees),
        "part_fits": [fit.to_dict() for fit in fitted.bank.part_fits.values()],
    }


def _leads(documents: Tensor, agrees: dict[str, Tensor], jump: Tensor) -> list[study.Row]:
    """Differences of mean agreement over start layers, paired by row.

    Attention against the other kinds over all start layers, and every kind against jumping over
    the blocks, from a third of the depth on.
    """
    last, rows = jump.shape[1] - 1, []
    sides = [("attn", kind, 0) for kind in agrees if "attn" in agrees and kind != "attn"]
    sides += [(kind, "jump", min(-(-last // 3), last - 1)) for kind in agrees]
    columns = {name: correct.double() for name, correct in {**agrees, "jump": jump}.items()}
    for part, against, start in sides:
        lead = (columns[part] - columns[against])[:, start:last].mean(1, keepdim=True)
        (row,) = estimates(documents, lead)
        rows.append({"part": part, "against": against, "start": start, **row})
    return rows


def _steps(documents: Tensor, agrees: dict[str, Tensor]) -> list[study.Row]:
    """How much agreement rises from one start layer to the next, paired by row."""
    return [
        {"map": kind, "layer": layer, **row}
        for kind, correct in agrees.items()
        for layer, row in enumerate(
            estimates(documents, torch.diff(correct.double()[:, :-1], dim=1))
        )
    ]


def _agreement(
    result: StudyResult, kind: str, start: int = 0, *, bias: bool = False
) -> list[study.Row]:
    """Agreement with one kind of part replaced, by start layer."""
    rows = result.rows("parts", map=kind, metric="precision@1", bias=bias)
    return [row for row in below_last(result, rows) if row["layer"] >= start]


def _means(result: StudyResult, start: int = 0) -> dict[str, float]:
    """Mean agreement over start layers, by kind of part."""
    shares = {kind: values(_agreement(result, kind, start)) for kind in NAMES}
    return {kind: sum(by_layer) / len(by_layer) for kind, by_layer in shares.items() if by_layer}


def _in_words(means: dict[str, float]) -> str:
    return ", ".join(f"{kind} {percent(mean)}" for kind, mean in means.items())


def findings(result: StudyResult) -> Iterator[study.Said]:
    """What is left of agreement."""
    means, (first, *_) = _means(result), result.rows("parts", metric="precision@1")
    order = sorted(means, key=means.__getitem__, reverse=True)
    listed = ", ".join(f"{NAMES[kind]} {percent(means[kind])}" for kind in order)
    yield PAGE.say("parts", kinds=listed, first=first)
    for kind in order:
        answered = result.rows("parts", map=kind, metric="answered", bias=False)
        worst = min(answered, key=lambda row: row["value"], default=None)
        if worst is not None and worst["value"] < 1:
            yield PAGE.say("unanswered", kind=NAMES[kind], worst=worst, share=1 - worst["value"])
    for kind in NAMES:
        plain = {row["layer"]: row["value"] for row in _agreement(result, kind)}
        changes = [
            row["value"] - plain[row["layer"]] for row in _agreement(result, kind, bias=True)
        ]
        if changes:
            points, n = 100 * sum(changes) / len(changes), len(changes)
            yield PAGE.say("intercept", kind=NAMES[kind], points=points, n=n)


@PAGE.claim("attention")
def _attention(result: StudyResult) -> study.Tested:
    rows = [row for row in result.rows("part_leads", part="attn") if row["against"] != "jump"]
    if not rows:
        return study.untested("attention and another kind of part could not both be replaced")
    answer = study.share_of((study.above(row) for row in rows), 1.0)
    return answer, {"kinds": _in_words(_means(result))}


@PAGE.claim("parts_beat_jumps")
def _parts_beat_jumps(result: StudyResult) -> study.Tested:
    rows = result.rows("part_leads", against="jump")
    start = rows[0]["start"]
    jump = both(result, "precision@1")[0][start:-1]
    about = {"start": start, "kinds": _in_words(_means(result, start))}
    return study.all_of(study.above(row) for row in rows), {**about, "jump": sum(jump) / len(jump)}


@PAGE.claim("norms")
def _norms(result: StudyResult) -> study.Tested:
    shares, steps = _agreement(result, "norms"), result.rows("part_steps", map="norms")
    if not shares:
        return study.untested("the norms of this model could not be replaced")
    last = result.model["n_layers"]
    early = shares[: max(1, last // 5)]
    first_half = [study.above(row, 0.1) for row in steps if row["layer"] < last / 2]
    ruined = study.all_of(study.below(row, 0.1) for row in early)
    sharp = study.share_of(first_half, 1 / len(first_half)) if first_half else "no"
    rise = ""
    if steps:
        steepest = max(steps, key=lambda row: row["value"])
        points = f"{100 * steepest['value']:.0f} points"
        rise = f"; steepest rise after layer {steepest['layer']}, by {points}"
    return study.all_of([ruined, sharp]), {"most": max(values(early)), "rise": rise}


LINES = {
    "attn": study.Line("attention replaced", "green"),
    "ffn": study.Line("feed-forward replaced", "pink"),
    "norms": study.Line("norms replaced", "olive"),
}
LINES |= {
    f"{kind} +b": study.Line("same, intercept", line.colour, "", "dashed", 0, 1.0)
    for kind, line in LINES.items()
} | curves.LENSES


BIASED = {True: " +b", False: ""}


def _points(metric: str) -> Callable[[StudyResult], list[study.Row]]:
    """Replaced parts, beside readings that skip all blocks."""
    parts = study.points("parts", line="{map}{bias}", metric=metric, words={"bias": BIASED})
    maps = ("mat", "id")
    whole = study.points("scores", line="{map}", metric=metric, map=maps, **curves.MAIN)
    return lambda result: [*replaced, *whole(result)] if (replaced := parts(result)) else []


SECTION = PAGE.section(
    "parts",
    run,
    findings=findings,
    shows=(
        _attention,
        _parts_beat_jumps,
        _norms,
        PAGE.figure("parts", _points("precision@1"), lines=LINES),
        PAGE.figure("parts_surprisal", _points("surprisal"), lines=LINES, marks=curves.floor),
        PAGE.table(
            "parts-table",
            study.pick(
                "parts",
                metric=("precision@1", "surprisal"),
                bias=(False, True),
                words={"bias": BIASED, "metric": {"precision@1": "P@1", "surprisal": "nats"}},
            ),
            forms={f"P@1 {line}": curves.IN_PERCENT for line in LINES},
        ),
    ),
)
