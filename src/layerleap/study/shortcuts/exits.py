"""Early exit, replayed: every rule through every lens, and rules with a promise.

In: the scores of one pass over each text, by lens; costs; a tolerance.
Out: plain tables: curves of agreement against layers and FLOPs, layers saved at wanted agreements,
and calibrated rules tried on rows that neither the maps nor the rules have seen: other rows of the
same documents, for which the promise is made, and other texts, for which it is not.

Rows are divided once. A third of the documents trains the learned rule; the rows of all other
documents are dealt at random into those that thresholds are calibrated on and those that the
promise is verified on: dealt singly, they are exchangeable, which is what the promise rests on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerleap.act.exits.calibration import Calibrated, calibrate, verify
from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import Evidence, split
from layerleap.act.exits.families import LAMBDAS, MORE_LAMBDAS, Family, family
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.replay import curve, replay
from layerleap.act.exits.rules import (
    Entropy,
    Fixed,
    Gap,
    Never,
    Oracle,
    Patience,
    Rule,
    Similarity,
    TopProbability,
)
from layerleap.act.exits.savings import TARGETS, saved_at
from layerleap.errors import BadSettings
from layerleap.read.scores import Scores

Row = dict[str, Any]
METHODS = {"ltt": "learn-then-test", "crc": "conformal risk control"}
PROMISED = ("gap", "entropy", "learned")  # rules whose thresholds are calibrated
KNOBS = 40  # of the curves of all rules but the paper's, which has its own


@dataclass(frozen=True)
class Lensed:
    """What one lens showed of the main text and of the others, and what using it costs."""

    main: Evidence
    others: Mapping[str, Evidence]
    cost: Cost
    train: Evidence | None  # rows that the learned rule is trained on
    rest: Evidence  # rows that it is not
    calibrate: Evidence
    verify: Evidence
    families: Mapping[str, Family]  # every kind of rule with a knob


def lensed(
    scores: Mapping[str, Scores], text: str, label: str, cost: Cost, *, seed: int = 0
) -> Lensed:
    """The rows of one lens, divided; the division is the same for every lens.

    Args:
        scores: by text.
        text: the main one.
        label: the name of the lens in the scores.
        cost: with its maps.
        seed: of the division.
    """
    main = Evidence.from_scores(scores[text], label)
    try:
        train, rest = split(main, (1 / 3, 2 / 3), seed=seed)
    except BadSettings:  # too few documents to keep some apart
        train, rest = None, main
    first, second = split(rest, (0.5, 0.5), seed=seed, by="row")
    others = {
        name: Evidence.from_scores(found, label)
        for name, found in scores.items()
        if name != text and label in found.top
    }
    return Lensed(main, others, cost, train, rest, first, second, _families(main, train))


def _families(main: Evidence, train: Evidence | None) -> dict[str, Family]:
    """Every kind of rule with a knob; the learned one if there are documents to train it on."""
    length = 1 + main.position.double().mean().item()
    found = {
        "gap": family(Gap, length=length),
        "top probability": family(TopProbability),
        "entropy": family(Entropy),
        "similarity": family(Similarity),
        "patience": family(Patience),
    }
    if train is not None:
        found["learned"] = Learned.train(train)
    return found


def exit_tables(lenses: Mapping[str, Lensed]) -> dict[str, Any]:
    """Curves and savings of every rule through every lens, by the lens's name (id, mat, ...)."""
    curves: list[Row] = []
    saved: list[Row] = []
    for name, rows in lenses.items():
        for rule, kind in rows.families.items():
            # A rule is never judged by rows that it was trained on.
            evidence = rows.rest if rule == "learned" else rows.main
            members = [kind.at(knob) for knob in _knobs(kind, evidence)]
            curves += _curve(name, rule, members, evidence, rows.cost)
            saved += _saved(name, rule, kind, evidence, rows.cost)
        layers = range(1, rows.cost.n_layers)
        curves += _curve(name, "fixed", [Fixed(layer) for layer in layers], rows.main, rows.cost)
        curves += _curve(name, "oracle", [Oracle()], rows.main, rows.cost)
    return {"cost": _cost(lenses), "curves": curves, "saved": saved}


def _knobs(kind: Family, evidence: Evidence) -> list[float]:
    if kind.name == Gap.name:
        return sorted({*LAMBDAS, *MORE_LAMBDAS})
    return kind.grid(KNOBS, evidence.layers[-1])


def _curve(lens: str, rule: str, members: list[Rule], evidence: Evidence, cost: Cost) -> list[Row]:
    """Rows of one curve; FLOPs as a share of the full model's."""
    return [
        {**row, "map": lens, "rule": rule, "flops": row["flops"] / cost.full}
        for row in curve(members, evidence, cost)
    ]


def _saved(lens: str, rule: str, kind: Family, evidence: Evidence, cost: Cost) -> list[Row]:
    knobs = _knobs(kind, evidence)
    between = saved_at(kind, evidence, TARGETS, method="curve", knobs=knobs)
    found = []
    for exact, read_off in zip(saved_at(kind, evidence, TARGETS), between, strict=True):
        member = Never() if exact.knob is None else kind.at(exact.knob)
        flops = cost.of(replay(member, evidence), member, evidence.layers)
        found.append(
            {
                **exact.to_dict(), "map": lens, "rule": rule, "share": exact.saved / cost.n_layers,
                "flops": 1 - flops / cost.full, "interpolated": read_off.saved,
            }
        )  # fmt: skip
    return found


def _cost(lenses: Mapping[str, Lensed]) -> Row:
    """What a block, a map and the head cost; the map of the lens that has the dearest."""
    cost = max((rows.cost for rows in lenses.values()), key=lambda cost: sum(cost.maps))
    return {
        "block": sum(cost.blocks) / cost.n_layers, "head": cost.head,
        "map": sum(cost.maps) / cost.n_layers, "n_layers": cost.n_layers,
        "tokens": cost.context, "head_in_blocks": cost.head_in_blocks, "full": cost.full,
    }  # fmt: skip


def calibrated_tables(
    lenses: Mapping[str, Lensed],
    text: str,
    tolerance: float,
    delta: float,
    promised: Sequence[str] = PROMISED,
) -> dict[str, Any]:
    """Rules with a promise, and how they keep it on fresh rows; `BadSettings` with too few rows."""
    found = []
    for name, rows in lenses.items():
        for rule, kind in rows.families.items():
            if rule in promised:
                for method in METHODS:
                    chosen = calibrate(
                        kind,
                        rows.calibrate,
                        tolerance,
                        delta=delta,
                        method=method,  # type: ignore[arg-type]
                    )
                    found.append(_promise(name, rule, chosen, rows, text))
    one = next(iter(lenses.values()))
    splits = {"train": 0 if one.train is None else len(one.train)}
    splits |= {"calibrate": len(one.calibrate), "verify": len(one.verify)}
    return {"tolerance": tolerance, "delta": delta, "splits": splits, "rows": found}


def _promise(lens: str, rule: str, chosen: Calibrated, rows: Lensed, text: str) -> Row:
    member = chosen.rule
    fresh = []
    for name, evidence in {text: rows.verify, **rows.others}.items():
        seen = verify(chosen, evidence)
        flops = rows.cost.of(
            replay(member or Never(), evidence), member or Never(), evidence.layers
        )
        said = {key: value for key, value in seen.to_dict().items() if key != "within"}
        fresh.append(
            {
                **said, "text": name, "promised": name == text,
                # A share a little above the tolerance may be chance: refuted is what cannot be.
                "holds": seen.low <= chosen.tolerance,
                "flops": flops / rows.cost.full,
            }
        )  # fmt: skip
    return {
        "map": lens, "rule": rule, "method": METHODS[chosen.method],
        "knob": None if member is None else getattr(member, member.knob),  # type: ignore[attr-defined]
        "calibrated_on": chosen.n, "observed": chosen.observed, "bound": chosen.bound,
        "fresh": fresh, "note": chosen.note,
    }  # fmt: skip


def same_rows(lenses: Mapping[str, Lensed], target: float = 0.95) -> list[Row]:
    """Rules beside the paper's on the very rows that none of them was trained on."""
    found = []
    for name, rows in lenses.items():
        for rule, kind in rows.families.items():
            if rule in ("gap", "entropy", "learned"):
                (one,) = saved_at(kind, rows.rest, (target,))
                found.append({**one.to_dict(), "map": name, "rule": rule})
    return found
