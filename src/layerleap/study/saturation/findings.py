"""What the numbers of a study of saturation say, in computed words.

In: the result of the study, without findings. Out: findings: a topic, which is a figure's key or
"headline", and a sentence.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Study = Mapping[str, Any]
Row = dict[str, Any]
TARGET = 0.95  # the agreement at which rules are compared in words
THROUGH = {"id": "the logit lens (id)", "mat": "the linear shortcuts (mat)"}


def findings(study: Study) -> list[dict[str, str]]:
    """All findings, headlines first."""
    made = [
        *_order(study), *_guesses(study), *_probe(study), *_intervention(study), *_exits(study),
        *_twin(study),
    ]  # fmt: skip
    found = [{"topic": topic, "text": text} for topic, text in made]
    return sorted(found, key=lambda row: row["topic"] != "headline")


Found = Iterator[tuple[str, str]]


def _order(study: Study) -> Found:
    for name, found in study["order"].items():
        settled = 1 - found["histogram"][0]["never"]
        yield (
            "histogram",
            (
                f"Through {name}, the top token of {settled:.0%} of {found['rows']:,} positions "
                "stands before the last block"
                + (
                    "."
                    if (mean := found["histogram"][0]["mean_layer"]) is None
                    else f"; there, on average, from layer {mean:.1f} of {found['n_layers']} on."
                )
            ),
        )
        yield "tau", f"Through {name}: {found['verdict'][0]} {found['others']}"
        yield "places", f"Through {name}: {found['verdict'][-1]}"
        yield "headline", f"Through {THROUGH[name]}, {_in_order(found)}."


def _in_order(found: Row) -> str:
    tau = found["tau"][0]
    if tau["value"] is None:
        return "too few positions settle to say whether ranks do so in order"
    numbers = f"strict tau {tau['value']:+.2f}"
    if (null := tau["exchangeable"]) is not None:
        numbers += f"; exchangeable ranks have {null['mean']:+.2f}"
    if (walk := tau["walk"]) is not None and walk["mean"] is not None:
        numbers += f", random walks {walk['mean']:+.2f}"
    if found["in_order"]:
        return f"ranks settle in order, beyond what both nulls give ({numbers})"
    if found["in_order"] is None:
        return f"whether ranks settle in order beyond chance cannot be told ({numbers})"
    if tau["beats_exchangeable"]:
        return f"ranks settle in order, but no more than in a random walk of logits ({numbers})"
    return f"ranks settle in no more order than chance gives ({numbers})"


def _guesses(study: Study) -> Found:
    for name, found in study["guesses"].items():
        for text in found["verdict"]:
            yield "guesses", f"Through {name}: {text}"


def _probe(study: Study) -> Found:
    for name, found in study["probe"].items():
        yield "probe", f"Labels through {name}, {found['tasks']} tasks: {found['words']}."
        if found["ambiguous"] > 0:
            yield (
                "probe",
                (
                    f"{found['ambiguous']:.0%} of labels through {name} had a choice of tasks, "
                    "because ranks settled out of order; the first was taken."
                ),
            )
        accuracy = found["rows"][0]
        verdict = "can be read off a single state" if reads_tasks(found) else (
            "cannot clearly be read off a single state"
        )  # fmt: skip
        yield (
            "headline",
            (
                f"Which rank is being decided {verdict} (labels through {name}): balanced accuracy "
                f"{accuracy['value']:.2f} on unseen documents, {accuracy['null']:.2f} with "
                f"exchanged labels, {accuracy['control']:.2f} on states that know nothing."
            ),
        )


def reads_tasks(found: Row) -> bool:
    """Better than exchanged labels, and the control at chance.

    Labels are exchanged among all rows, but rows of a document hang together, so a p-value alone
    would be too easily small; the interval over documents has to lie above chance as well.
    """
    accuracy = found["rows"][0]
    is_above = accuracy["low"] > max(1 / found["tasks"], accuracy["null"])
    return bool(accuracy["p"] <= 0.05 and is_above and found["control_at_chance"])


def _intervention(study: Study) -> Found:
    found = study["intervention"]
    if found is None:
        return
    yield "intervention", f"{found['words'][:1].upper()}{found['words'][1:]}."
    yield "intervention", found["by_definition"]
    kept = "changed nothing, to the bit" if found["identical"] else "CHANGED THE RUN: do not trust"
    yield "intervention", f"A row's own state put back in its place {kept}."


def saved(study: Study, lens: str, target: float = TARGET) -> dict[str, Row]:
    """By rule: layers saved at an agreement."""
    rows = (study["exits"] or {}).get("saved") or []
    return {
        row["rule"]: row
        for row in rows
        if row["map"] == lens and abs(row["target"] - target) < 1e-9
    }


def flops_of(row: Row) -> str:
    """What the layers saved come to once checks are paid for, in words."""
    share = row["flops"]
    if round(100 * share) == 0:
        return "as many FLOPs"
    return f"{abs(share):.0%} {'fewer' if share > 0 else 'more'} FLOPs"


def _exits(study: Study) -> Found:
    if study["exits"] is None:
        return
    for name in ("id", "mat"):
        found = saved(study, name)
        if not found:
            continue
        ranked = sorted(found.values(), key=lambda row: -row["saved"])
        listed = "; ".join(
            f"{row['rule']} {row['saved']:.2f}{_span(row)}, {flops_of(row)}" for row in ranked
        )
        n_layers = study["model"]["n_layers"]
        yield (
            "exits",
            (
                f"Of {n_layers} layers, with {TARGET:.0%} agreement through {name}, rules save on "
                f"average: {listed}."
            ),
        )
        task = found["task"]
        rest = _beside(task, [row for row in ranked if row is not task])
        yield (
            "headline",
            (
                f"At {TARGET:.0%} agreement, exiting by task through {name} saves "
                f"{task['saved']:.1f} of {n_layers} layers; {rest}."
            ),
        )
    full = study["exits"]["full"]
    if full["accuracy"] is not None:
        yield (
            "exits",
            (
                f"The full model's own answer is the right one in {full['accuracy']:.1%} of "
                f"{full['accuracy_rows']:,} positions with a known answer."
            ),
        )
    yield from _promises(study)
    yield from _live(study)


def _beside(task: Row, others: list[Row]) -> str:
    """How exiting by task compares with the best of the other rules, best first."""
    best = others[0]
    if best["saved"] >= task["saved"]:
        return f"{best['rule']} saves {best['saved']:.1f}" if best["saved"] else "no rule saves any"
    if None in (task["low"], best["high"]) or task["low"] <= best["high"]:
        return (
            f"more than any other rule tried, but not clearly ({best['rule']} {best['saved']:.1f})"
        )
    return "clearly more than any other rule tried"


def _promises(study: Study) -> Found:
    if study["exits"]["calibrated"] is None:
        return
    rows = study["exits"]["calibrated"]["rows"]
    fresh = [(row, row["fresh"][0]) for row in rows]
    broken = [f"{row['rule']} through {row['map']}" for row, seen in fresh if not seen["holds"]]
    silent = sum(row["knob"] is None for row in rows)
    text = (
        f"Of {len(fresh)} promises of calibrated thresholds, {silent} are to exit nowhere; of the "
    )
    text += f"others, {len(fresh) - silent - len(broken)} are not refuted on fresh rows."
    yield "calibrated", text + (f" Broken by {', '.join(broken)}." if broken else "")


def _live(study: Study) -> Found:
    rows = [row for row in study["exits"]["live"] or [] if row["rule"] != "never"]
    if not rows:
        return
    best = max(rows, key=lambda row: row["speed"])
    task = {row["map"]: row for row in rows if row["rule"] == "task"}
    text = (
        f"Live, at settings that agree in {TARGET:.0%} of replayed positions, the fastest of "
        f"{len(rows)} rules ({best['rule']} through {best['map']}) writes {best['speed']:.2f}"
        f"{_span(best)} times as fast as the model that never exits"
    )
    if not best["is_faster"]:
        text += ", which is not clearly faster"
    for name, row in task.items():
        text += f"; task through {name} {row['speed']:.2f}{_span(row)} times"
    yield "live", f"{text}."


def _span(row: Row) -> str:
    return "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"


def _twin(study: Study) -> Found:
    twin = study["twin"]
    if twin is None:
        return
    yield (
        "twin",
        (
            f"In the same model with random weights, {twin['settled']:.0%} of top tokens settle "
            "before the last block."
        ),
    )
    if twin["order"] is not None:
        yield "headline", f"In the untrained twin, {_in_order(twin['order'])}."
        yield "twin", f"In the untrained twin: {twin['order']['verdict'][-1]}"
    if twin["intervention"] is not None:
        yield "intervention", f"In the untrained twin, {twin['intervention']['words']}."
