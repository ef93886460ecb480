"""What "Jump to Conclusions" (arXiv 2303.09435) says, beside what a study saw.

In: the tables of a study. Out: one row per claim: the claim, what was seen, whether that agrees,
and what the verdict rests on. Every verdict is computed; what a study has no data for is "not
tested", with the reason. The paper's models were GPT-2 and BERT: another model may well differ.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from layerleap.study.shortcuts.more_findings import picked

Row = Mapping[str, Any]
Study = Mapping[str, Any]
Verdict = tuple[str, str, str]  # seen, agrees, why
EARLY = 1 / 3  # of the depth


def claims(study: Study) -> list[dict[str, str]]:
    """One row per claim of the paper that can be put to a test."""
    masked = study["model"]["kind"] == "masked-token"
    tested: list[tuple[str, Callable[[Study], Verdict]]] = [
        ("Shortcuts agree with the model more often than the logit lens, at every layer.",
         _more_often),
        ("The model is less surprised by a shortcut's token than by the logit lens's, at every "
         "layer.", _less_surprised),
        ("Between all pairs of layers, a shortcut explains more than the state itself (R2).", _r2),
        *(_MASKED if masked else _NEXT),
        ("At 95 % agreement, early exit saves more layers with shortcuts than without.", _exit),
        ("Exiting token by token beats exiting at one fixed layer, at the same mean number of "
         "layers.", _fixed),
        ("Shortcuts fitted on one text serve another; masked models lose next to nothing, "
         "next-token models some points of agreement.", _transfer),
        ("Of the parts of a block, attention is the cheapest to replace by a linear map.",
         _attention),
        ("From about a third of the depth on, replacing any one kind of part costs less than "
         "jumping over the blocks.", _parts_beat_jumps),
        ("Replaced norms ruin the answer in the first layers, and recover sharply.", _norms),
        ("Some schedules that take turns between blocks and jumps beat a single jump of the same "
         "cost.", _turns),
        ("The schedule with the best product of R2 is good only where few blocks are run.",
         _best_r2),
        ("Masked models of different size have different curves over relative depth." if masked
         else "Next-token models of different size have the same curve over relative depth.",
         _sizes),
        ("To human readers, shortcuts' guesses are more plausible than the logit lens's.",
         lambda _: untested("plausibility needs human readers")),
    ]  # fmt: skip
    return answered(tested, study)


def answered(
    tested: Iterable[tuple[str, Callable[[Study], Verdict]]], study: Study
) -> list[dict[str, str]]:
    """One row per claim, with what its test says of the study."""
    found = []
    for claim, test in tested:
        seen, agrees, why = test(study)
        found.append({"claim": claim, "seen": seen, "agrees": agrees, "why": why})
    return found


def untested(reason: str) -> Verdict:
    """No verdict, and why."""
    return "", "not tested", reason


def _graded(share: float) -> str:
    """All is yes, most is partly, less is no."""
    return "yes" if share >= 1 else "partly" if share > 0.5 else "no"


def _curve(study: Study, name: str, metric: str) -> list[float]:
    """A measure below the last layer on the main text, through mat or id."""
    text = study["settings"]["text"]
    rows = picked(study["scores"], fit="-" if name == "id" else text, read=text, metric=metric)
    rows = sorted(rows, key=lambda row: row["layer"])
    return [row["value"] for row in rows[: study["model"]["n_layers"]]]


def _more_often(study: Study) -> Verdict:
    counts = []
    for k in (1, 5, 10):
        mat, plain = (_curve(study, name, f"precision@{k}") for name in ("mat", "id"))
        counts.append(sum(a > b for a, b in zip(mat, plain, strict=True)))
    last = study["model"]["n_layers"]
    seen = f"above at {counts[0]}, {counts[1]} and {counts[2]} of {last} layers (top 1, 5 and 10)"
    return seen, _graded(min(counts) / last), "yes if at all layers, partly if at most of them"


def _less_surprised(study: Study) -> Verdict:
    mat, plain = (_curve(study, name, "surprisal") for name in ("mat", "id"))
    lower = sum(a < b for a, b in zip(mat, plain, strict=True))
    return (
        f"lower at {lower} of {len(mat)} layers",
        _graded(lower / len(mat)),
        "yes if at all layers, partly if at most of them",
    )


def _r2(study: Study) -> Verdict:
    by = {(row["map"], row["src"], row["dst"]): row["r2"] for row in study["r2"]}
    pairs = [key[1:] for key in by if key[0] == "mat" and None not in (by[key], by["id", *key[1:]])]
    if not pairs:
        return untested("no pair of layers has an R2 here: too few rows were read")
    wins = sum(by["mat", *pair] > by["id", *pair] for pair in pairs)
    failed = sum(by["id", *pair] <= 0 for pair in pairs)
    return (
        f"in {wins} of {len(pairs)} pairs; without a map, R2 is 0 or below in {failed}",
        _graded(wins / len(pairs)),
        "yes if for all pairs, partly if for most",
    )


def _early_precision(study: Study) -> Verdict:
    mat = _curve(study, "mat", "precision@1")
    early = mat[: max(1, round(EARLY * len(mat)))]
    inside = sum(0.28 <= value <= 0.45 for value in early) / len(early)
    agrees = "yes" if inside == 1 else "partly" if inside > 0 else "no"
    return (
        f"{min(early):.0%} to {max(early):.0%} over the first third of the layers",
        agrees,
        f"{inside:.0%} of these layers lie in the paper's range",
    )


def _lead(study: Study) -> Verdict:
    mat, plain = (_curve(study, name, "precision@1") for name in ("mat", "id"))
    first = max(1, round(0.9 * len(mat)))
    lead = [100 * (a - b) for a, b in zip(mat, plain, strict=True)][:first]
    wide = sum(value > 20 for value in lead)
    return (
        f"{min(lead):.0f} to {max(lead):.0f} points; above 20 at {wide} of {first} layers",
        _graded(wide / first),
        "the paper's 44 of 48 layers are the first nine tenths of the depth",
    )


def _blind_early(study: Study) -> Verdict:
    plain = _curve(study, "id", "precision@10")
    early = plain[: max(1, round(0.4 * len(plain)))]
    return (
        f"at most {max(early):.0%} (top 10) over the first two fifths of the layers",
        "yes" if max(early) < 0.05 else "partly" if min(early) < 0.05 else "no",
        "yes if below 5 % at all of these layers, partly if at some",
    )


def _quarter(study: Study) -> Verdict:
    mat = _curve(study, "mat", "precision@1")
    later = mat[round(len(mat) / 8) :]
    return (
        f"at least {min(later):.0%} from layer {len(mat) - len(later)} of {len(mat)} on",
        "yes" if min(later) > 0.25 else "no",
        "layer 3 of the paper's 24 is an eighth of the depth",
    )


def _id_fails(study: Study) -> Verdict:
    rows = [row["r2"] for row in study["r2"] if row["map"] == "id" and row["r2"] is not None]
    if not rows:
        return untested("no pair of layers has an R2 here: too few rows were read")
    failed = sum(value <= 0 for value in rows)
    return (
        f"R2 is 0 or below in {failed} of {len(rows)} pairs",
        "yes" if failed > len(rows) / 2 else "no",
        "yes if in more than half of them",
    )


def _masked_lead(study: Study) -> Verdict:
    mat, plain = (_curve(study, name, "precision@1") for name in ("mat", "id"))
    wide = sum(a - b > 0.1 for a, b in zip(mat, plain, strict=True))
    return (
        f"at {wide} of {len(mat)} layers",
        "yes" if wide > len(mat) / 2 else "no",
        "yes if at more than half of them",
    )


_NEXT: list[tuple[str, Callable[[Study], Verdict]]] = [
    ("In early layers shortcuts foretell 28 to 45 % of a next-token model's answers.",
     _early_precision),
    ("The lead over the logit lens is more than 20 points at all but the last layers.", _lead),
]  # fmt: skip
_MASKED: list[tuple[str, Callable[[Study], Verdict]]] = [
    ("Without a map, R2 of a masked model is no better than the mean for most pairs of layers.",
     _id_fails),
    ("The lead over the logit lens is more than ten points at most layers.", _masked_lead),
    ("In the early layers of a masked model the logit lens sees next to nothing.", _blind_early),
    ("From an eighth of the depth on, a shortcut foretells more than a quarter of a masked "
     "model's answers.", _quarter),
]  # fmt: skip


def _exit(study: Study) -> Verdict:
    exits = study.get("exits")
    if not exits:
        return untested("this study has no early exits")
    rows = {row["map"]: row for row in picked(exits["saved"], rule="gap", target=0.95)}
    mat, plain = rows["mat"], rows["id"]
    times = f", {mat['saved'] / plain['saved']:.1f} times as many" if plain["saved"] else ""
    return (
        f"{mat['saved']:.1f} of {exits['cost']['n_layers']} layers with shortcuts, "
        f"{plain['saved']:.1f} without{times} ({mat['rows']:,} rows)",
        "yes" if mat["saved"] > plain["saved"] else "no",
        "the paper's rule, its boldest threshold that keeps 95 %",
    )


def _fixed(study: Study) -> Verdict:
    exits = study.get("exits")
    if not exits:
        return untested("this study has no early exits")
    better = compared = 0
    for name in ("id", "mat"):
        points = picked(exits["curves"], map=name, rule="fixed")
        fixed = sorted((row["layers"], row["agreement"]) for row in points)
        fixed.append((exits["cost"]["n_layers"], 1.0))  # the model itself
        for row in picked(exits["curves"], map=name, rule="gap"):
            level = _between(fixed, row["layers"])
            # Where nobody or everybody exits at once, both are the same thing.
            if level is not None and 1 < row["layers"] < exits["cost"]["n_layers"]:
                compared += 1
                better += row["agreement"] > level
    if not compared:
        return untested("no threshold of the paper's grid exits anywhere in between")
    return (
        f"at {better} of {compared} thresholds, through id and mat",
        _graded(better / compared),
        "fixed exits interpolated to the same mean number of layers",
    )


def _between(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The height of the polygon through `points` at x, None outside."""
    for (a, low), (b, high) in pairwise(points):
        if a <= x <= b:
            return low + (high - low) * (x - a) / (b - a)
    return None


def _transfer(study: Study) -> Verdict:
    text, other = study["settings"]["text"], study["settings"]["other"]
    if other is None:
        return untested("only one text was given")
    fits, last, changes = study["summary"]["equal_fits"], study["model"]["n_layers"], []
    for read, away in ((text, other), (other, text)):
        home, guest = (
            [r["value"] for r in picked(study["scores"], fit=fits[fit], read=read,
                                        metric="precision@1") if r["layer"] < last]
            for fit in (read, away)
        )  # fmt: skip
        changes.append(100 * sum(b - a for a, b in zip(home, guest, strict=True)) / last)
    worst = min(changes)
    masked = study["model"]["kind"] == "masked-token"
    some = worst > -2 if masked else -10 < worst < -1
    return (
        f"{changes[0]:+.1f} points reading {text}, {changes[1]:+.1f} reading {other}",
        "yes" if some else "partly" if worst >= -1 else "no",
        "masked: a loss below 2 points; next-token: of 1 to 10, partly if less; equal sizes",
    )


def _means(study: Study, start: float = 0.0) -> dict[str, float]:
    """Mean agreement of each kind of part over start layers from a share of the depth on."""
    last, found = study["model"]["n_layers"], {}
    for kind in ("attn", "ffn", "norms"):
        rows = picked(study["parts"]["scores"], map=kind, metric="precision@1", bias=False)
        values = [row["value"] for row in rows if start * last <= row["layer"] < last]
        if values:
            found[kind] = sum(values) / len(values)
    return found


def _attention(study: Study) -> Verdict:
    means = _means(study) if study.get("parts") else {}
    if len(means) < 2 or "attn" not in means:
        return untested(_no_parts(study))
    said = ", ".join(f"{kind} {value:.0%}" for kind, value in means.items())
    return (
        f"mean agreement that is left: {said}",
        "yes" if max(means, key=means.__getitem__) == "attn" else "no",
        "averaged over all start layers",
    )


def _parts_beat_jumps(study: Study) -> Verdict:
    means = _means(study, EARLY) if study.get("parts") else {}
    if not means:
        return untested(_no_parts(study))
    mat = _curve(study, "mat", "precision@1")
    jump = sum(later := mat[-(-len(mat) // 3) :]) / len(later)
    above = [kind for kind, value in means.items() if value > jump]
    said = ", ".join(f"{kind} {value:.0%}" for kind, value in means.items())
    return (
        f"from a third of the depth on: {said}; whole blocks jumped over {jump:.0%}",
        _graded(len(above) / len(means)),
        "mean agreement over start layers; yes if all kinds lie above the jump",
    )


def _norms(study: Study) -> Verdict:
    rows = picked((study.get("parts") or {}).get("scores") or [], map="norms",
                  metric="precision@1", bias=False)  # fmt: skip
    if not rows:
        return untested(_no_parts(study))
    last = study["model"]["n_layers"]
    values = [row["value"] for row in sorted(rows, key=lambda r: r["layer"]) if row["layer"] < last]
    steps = [b - a for a, b in pairwise(values)]
    steepest = max(range(len(steps)), key=steps.__getitem__) if steps else 0
    early = values[: max(1, last // 5)]
    jump = steps[steepest] if steps else 0.0
    return (
        f"at most {max(early):.0%} over the first fifth of start layers; steepest rise after layer "
        f"{steepest}, by {100 * jump:.0f} points",
        "no" if max(early) >= 0.1 else "yes" if jump > 0.1 and steepest < last / 2 else "partly",
        "yes if below 10 % at first, and one step in the first half gains more than 10 points",
    )


def _no_parts(study: Study) -> str:
    parts = study.get("parts")
    return (parts or {}).get("reason") or "this study replaced no parts"


def _turns(study: Study) -> Verdict:
    better, compared, _ = _against_jumps(study, "round robin")
    if not compared:
        return untested("this study ran no schedules")
    rows = picked(study["schedules"], metric="precision@1")
    single = {row["blocks"]: row for row in picked(rows, kind="single jump")}
    clear = sum(
        row["low"] is not None and row["low"] > single[row["blocks"]]["high"]
        for row in picked(rows, kind="round robin")
    )
    return (
        f"{better} of {compared} round-robins are ahead, {clear} of them clearly",
        "yes" if clear else "partly" if better else "no",
        "clearly: the two 95 % intervals do not meet; partly if any is ahead at all",
    )


def _best_r2(study: Study) -> Verdict:
    _, compared, leads = _against_jumps(study, "best R2")
    if not compared:
        return untested("this study ran no schedules")
    half = study["model"]["n_layers"] / 2
    few = [lead for blocks, lead in leads if blocks <= half]
    many = [lead for blocks, lead in leads if blocks > half]
    if not few or not many:
        return untested("schedules of few and of many blocks are needed to compare")
    means = [100 * sum(part) / len(part) for part in (few, many)]
    return (
        f"against single jumps {means[0]:+.1f} points with up to half of the blocks, "
        f"{means[1]:+.1f} with more",
        "yes" if means[0] > 0 >= means[1] else "partly" if means[0] > 0 else "no",
        "yes if ahead of the single jump in the first half alone, partly if in both",
    )


def _against_jumps(study: Study, kind: str) -> tuple[int, int, list[tuple[int, float]]]:
    """How many schedules of a kind beat the single jump, of how many, and by how much each."""
    rows = picked(study.get("schedules") or [], metric="precision@1")
    single = {row["blocks"]: row["value"] for row in picked(rows, kind="single jump")}
    leads = [
        (row["blocks"], row["value"] - single[row["blocks"]])
        for row in picked(rows, kind=kind)
        if row["blocks"] in single
    ]
    return sum(lead > 0 for _, lead in leads), len(leads), leads


def _sizes(study: Study) -> Verdict:
    rows = picked(study.get("sizes") or [], metric="precision@1", map="mat")
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["model"], []).append((row["layer"] / row["n_layers"], row["value"]))
    if len(curves) < 2:
        return untested("it needs models of one family in several sizes; one model was studied")
    tenths = [n / 10 for n in range(10)]
    heights = [[_between(sorted(points), x) or 0.0 for x in tenths] for points in curves.values()]
    widest = 100 * max(max(column) - min(column) for column in zip(*heights, strict=True))
    masked = study["model"]["kind"] == "masked-token"
    return (
        f"the curves of {len(curves)} models are up to {widest:.0f} points apart",
        "yes" if (widest <= 10) != masked else "no",
        "the same: at most 10 points apart; whether they are one family is for the reader to say",
    )
