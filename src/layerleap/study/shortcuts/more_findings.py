"""What the optional parts of a shortcut study say, in words; every sentence is computed.

In: the tables of a study. Out: findings by topic: parts, alternation, exits, promises, training,
sizes. A part that the study does not have says nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Found = Iterator[tuple[str, str]]
NAMES = {"attn": "attention", "ffn": "the FFN", "norms": "the norms"}


def more_findings(study: Mapping[str, Any]) -> list[dict[str, str]]:
    """Sentences for the captions of the optional sections."""
    makers = (_parts, _alternation, _exits, _same_rows, _flops, _calibrated, _tuned, _sizes)
    return [
        {"topic": topic, "text": sentence} for make in makers for topic, sentence in make(study)
    ]


def picked(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows that say all of `wanted`."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _parts(study: Mapping[str, Any]) -> Found:
    rows = (study.get("parts") or {}).get("scores") or []
    last = study["model"]["n_layers"]
    means = {}
    for kind in NAMES:
        own = picked(rows, map=kind, metric="precision@1", bias=False)
        below = [row["value"] for row in own if row["layer"] < last]
        if below:
            means[kind] = sum(below) / len(below)
    if not means:
        return
    order = sorted(means, key=means.__getitem__, reverse=True)
    said = ", ".join(f"{NAMES[kind]} {means[kind]:.0%}" for kind in order)
    sample = next(row for row in rows if row["metric"] == "precision@1")
    yield (
        "parts",
        f"Agreement that is left, averaged over the layers from which on a part is replaced: "
        f"{said} (n = {sample['rows']:,} texts of {sample['documents']:,} documents).",
    )
    for kind in order:
        silent = picked(rows, map=kind, metric="answered", bias=False)
        lost = [row for row in silent if row["value"] < 1]
        if lost:
            worst = min(lost, key=lambda row: row["value"])
            yield (
                "parts",
                f"With {NAMES[kind]} replaced from layer {worst['layer']} on, the model runs out "
                f"of numbers (NaN or infinite) in {1 - worst['value']:.0%} of texts; such texts "
                "count as wrong, and surprisal has no mean there.",
            )
    yield from _intercepts([row for row in rows if row["layer"] < last])


def _intercepts(rows: Sequence[Row]) -> Found:
    by = {
        (row["map"], row["layer"], row["bias"]): row["value"]
        for row in picked(rows, metric="precision@1")
    }
    for kind, name in NAMES.items():
        pairs = [(by[key], by[kind, key[1], False]) for key in by if key[0] == kind and key[2]]
        if pairs:
            change = 100 * sum(b - a for b, a in pairs) / len(pairs)
            yield (
                "parts",
                f"Fitted with an intercept, the maps of {name} change the agreement that is left "
                f"by {change:+.1f} points on average over {len(pairs)} start layers.",
            )


def _alternation(study: Mapping[str, Any]) -> Found:
    rows = picked(study.get("schedules") or [], metric="precision@1")
    single = {row["blocks"]: row for row in picked(rows, kind="single jump")}
    for kind, said in (("round robin", "round-robins"), ("best R2", "schedules of the best R2")):
        own = [row for row in picked(rows, kind=kind) if row["blocks"] in single]
        if not own:
            continue
        lead = [row["value"] - single[row["blocks"]]["value"] for row in own]
        better = sum(value > 0 for value in lead)
        best = max(range(len(own)), key=lead.__getitem__)
        yield (
            "alternation",
            f"{better} of {len(own)} {said} keep more agreement than a single jump after as many "
            f"blocks; the best, {own[best]['schedule']}, keeps {own[best]['value']:.0%} with "
            f"{own[best]['blocks']} blocks against {single[own[best]['blocks']]['value']:.0%}.",
        )


def _exits(study: Mapping[str, Any]) -> Found:
    exits = study.get("exits")
    if not exits:
        return
    last = study["model"]["n_layers"]
    for target in (0.95,):
        rows = picked(exits["saved"], rule="gap", target=target)
        said = ", ".join(
            f"{row['map']} {row['saved']:.1f} ({row['share']:.1%}; 95 % interval "
            f"{row['low']:.1f} to {row['high']:.1f})"
            if row["low"] is not None
            else f"{row['map']} {row['saved']:.1f} ({row['share']:.1%})"
            for row in rows
        )
        yield (
            "exit",
            f"At {target:.0%} agreement the paper's rule saves, of {last} layers: {said} "
            f"(n = {rows[0]['rows']:,} rows of {rows[0]['documents']:,} documents).",
        )
    for row in picked(exits["curves"], rule="oracle"):
        yield (
            "exit",
            f"An oracle that leaves at the first layer whose top token through {row['map']} is the "
            f"final one runs {row['layers']:.1f} layers on average: no rule that always agrees can "
            "run fewer.",
        )


def _same_rows(study: Mapping[str, Any]) -> Found:
    rows = (study.get("exits") or {}).get("same_rows") or []
    base = next(iter(picked(rows, map="mat", rule="gap")), None)
    if base is None:
        return
    said = []
    for row in rows:
        if row is not base:
            ratio = f", {row['saved'] / base['saved']:.2f} times" if base["saved"] else ""
            ends = "" if row["low"] is None else f", {row['low']:.2f} to {row['high']:.2f}"
            said.append(
                f"{row['rule']} through {row['map']} {row['saved']:.2f} ({ratio[2:]}{ends})"
            )
    ends = "" if base["low"] is None else f" ({base['low']:.2f} to {base['high']:.2f})"
    yield (
        "exit_rules",
        f"On the same {base['rows']:,} rows, which no rule was trained on, at {base['target']:.0%} "
        f"agreement the paper's rule through mat saves {base['saved']:.2f} layers{ends}; "
        f"{'; '.join(said)}. In brackets: times the paper's rule, and the 95 % interval.",
    )


def _flops(study: Mapping[str, Any]) -> Found:
    exits = study.get("exits")
    if not exits:
        return
    every = [row for row in exits["saved"] if row["target"] == 0.95]
    rows = [row for row in every if row["knob"] is not None]
    if not rows:
        yield ("exit_flops", "At 95 % agreement no rule exits anywhere, so none saves FLOPs.")
        return
    best = max(rows, key=lambda row: row["flops"])
    change = (
        f"saves {best['flops']:.1%} of the FLOPs"
        if best["flops"] > 0
        else f"costs {-best['flops']:.0%} more FLOPs than not exiting"
    )
    paying = sum(row["flops"] > 0 for row in rows)
    yield (
        "exit_flops",
        f"With a check at every layer counted in, {paying} of the {len(rows)} rules that exit at "
        f"95 % agreement save FLOPs; the cheapest ({best['rule']} through {best['map']}) {change}. "
        f"A head costs as much as {exits['cost']['head_in_blocks']:.1f} blocks.",
    )


def _calibrated(study: Mapping[str, Any]) -> Found:
    promised = study.get("calibrated")
    if not promised:
        return
    rows = promised["rows"]
    fresh = [f for row in rows for f in row["fresh"] if f["promised"] and row["knob"] is not None]
    kept = sum(f["holds"] for f in fresh)
    below = sum(f["disagreement"] <= promised["tolerance"] for f in fresh)
    nowhere = sum(row["knob"] is None for row in rows)
    yield (
        "calibrated",
        f"Promised at most {promised['tolerance']:.0%} disagreement: on "
        f"{promised['splits']['verify']:,} fresh rows of the same documents {below} of "
        f"{len(fresh)} calibrated rules stay below it, and {kept} do so up to chance"
        + (f"; {nowhere} found no threshold to promise anything for, and exit nowhere." if nowhere
           else "."),
    )  # fmt: skip
    tested = [row for row in rows if row["method"] == "learn-then-test" and row["knob"] is not None]
    if tested:
        best = max(tested, key=lambda row: row["fresh"][0]["saved"])
        seen = best["fresh"][0]
        yield (
            "calibrated",
            f"Of {len(tested)} promises, each with a confidence of {1 - promised['delta']:.0%} by "
            f"itself, the rule {best['rule']!r} through {best['map']} saves most on fresh rows: "
            f"{seen['saved']:.1f} layers, with {seen['disagreement']:.1%} disagreement.",
        )
    away = [
        f for row in rows for f in row["fresh"] if not f["promised"] and row["knob"] is not None
    ]
    if away:
        within = sum(f["holds"] for f in away)
        yield (
            "calibrated",
            f"On another text, for which nothing was promised, {within} of {len(away)} stayed "
            "within the tolerance.",
        )


def _tuned(study: Mapping[str, Any]) -> Found:
    rows = (study.get("tuned") or {}).get("summary") or []
    for start in ("mat", "identity"):
        own = [row for row in rows if row["start"] == start]
        if not own:
            continue
        ends = [row for row in own if None not in (row["kl_tuned"], row["kl_closed"])]
        beaten = [row for row in ends if row["kl_tuned"] < row["kl_closed"]]
        needed = sorted({row["rows_needed"] for row in beaten if row["rows_needed"] is not None})
        ends_at = dict.fromkeys((needed[0], needed[-1])) if needed else {}
        said = " to ".join(f"{rows:,}" for rows in ends_at)
        where = "the closed form" if start == "mat" else "the identity"
        yield (
            "tuned",
            f"Trained from {where}, {len(beaten)} of {len(own)} layers end below the closed "
            f"form's KL{f'; they got there after {said} rows' if said else ''}.",
        )


def _sizes(study: Mapping[str, Any]) -> Found:
    rows = picked(study.get("sizes") or [], metric="precision@1", map="mat")
    by: dict[str, list[Row]] = {}
    for row in rows:
        by.setdefault(row["model"], []).append(row)
    if len(by) < 2:
        return
    said = []
    for model, own in by.items():
        middle = min(own, key=lambda row: abs(row["layer"] / row["n_layers"] - 0.5))
        said.append(f"{model} {middle['value']:.0%}")
    yield ("sizes", f"Agreement through shortcuts at half of the depth: {', '.join(said)}.")
