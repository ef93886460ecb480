"""Exiting by task beside other rules: same rows, counted blocks, FLOPs, calibrated thresholds.

In: what a model showed of a text, and costs. Out: plain tables: curves with agreement and accuracy
on the true answer, layers saved at wanted agreements, and calibrated rules on fresh rows.

A third of the documents trains the probe and the learned rule. All rules are then judged on the
rows of all other documents; for calibration these are dealt singly into two halves.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerleap.act.exits.cost import Cost, measure
from layerleap.act.exits.evidence import Evidence, split
from layerleap.act.exits.families import Family, family
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.replay import replay
from layerleap.act.exits.rules import Fixed, Gap, Never, Oracle, Patience, Rule, Similarity, Task
from layerleap.errors import BadSettings
from layerleap.maps.bank import ShortcutBank
from layerleap.read.metrics import finite, mean_interval
from layerleap.read.probes.cells import CellSampling
from layerleap.read.probes.task import TaskProbe
from layerleap.study.saturation.rows import SaturationData, SomeStates, numbers
from layerleap.study.shortcuts.exits import Lensed, calibrated_tables, exit_tables

Row = dict[str, Any]
TARGET = 0.95  # the agreement at which rules are tried live
RULES = ("task", "gap", "similarity", "patience", "learned")


def task_exits(
    seen: SaturationData,
    costs: Mapping[str, Cost],
    text: str,
    *,
    tolerance: float = 0.05,
    delta: float = 0.05,
    cells: int = 3000,
    seed: int = 0,
) -> tuple[dict[str, Any], dict[tuple[str, str], Rule]]:
    """Every rule through every lens that has a cost; `BadSettings` or `BadText` with too few rows.

    Returns the tables, and by lens and name the rules that save most at an agreement of `TARGET`.

    Args:
        seen: the rows.
        costs: by lens.
        text: its name, for tables.
        tolerance: largest disagreement that calibrated rules may have.
        delta: how often that promise may be broken.
        cells: (row, layer) that the probe is trained on, at most.
        seed: of all divisions.
    """
    known: dict[str, Lensed] = {}
    gold: dict[str, Tensor] = {}
    probes = {}
    for name, cost in costs.items():
        known[name], gold[name], probe = _lensed(seen, name, cost, cells, seed)
        probes[name] = {**probe.data, "layers": list(probe.layers)}
    tables = exit_tables(known)
    for name, rows in known.items():
        answers = gold[name]
        curves = [row for row in tables["curves"] if row["map"] == name]
        members = [_member(row, rows.families) for row in curves]
        for row, found in zip(curves, _accuracy(members, rows.rest, answers), strict=True):
            row |= found
    promised, why = None, None
    try:
        promised = calibrated_tables(known, text, tolerance, delta, RULES)
    except BadSettings as error:  # too few rows for a promise; all else stands
        why = str(error)
    full = _accuracy([Never()], *_one(known, gold))[0]
    more = {"calibrated": promised, "not_calibrated": why, "probes": probes, "full": full}
    rules = {
        (row["map"], row["rule"]): known[row["map"]].families[row["rule"]].at(row["knob"])
        for row in tables["saved"]
        if row["target"] == TARGET and row["knob"] is not None
    }
    more["right"] = {
        f"{name}, {rule}": _accuracy([one], known[name].rest, gold[name])[0]["accuracy"]
        for (name, rule), one in rules.items()
    }
    return {**tables, **more}, rules


def costs_of(seen: SaturationData, bank: ShortcutBank | None, tokens: int) -> dict[str, Cost]:
    """By lens, what blocks, maps and heads cost in a text of so many tokens."""
    found = {}
    for name in seen.lenses:
        cost = measure(seen.transformer, tokens=tokens, bank=bank if name == "mat" else None)
        if seen.transformer.kind != "next-token":  # one answer takes the whole input
            cost = replace(cost, blocks=tuple(cost.context * block for block in cost.blocks))
        found[name] = cost
    return found


def _one(known: Mapping[str, Lensed], gold: Mapping[str, Tensor]) -> tuple[Evidence, Tensor]:
    name = next(iter(known))
    return known[name].rest, gold[name]


def training_documents(seen: SaturationData, seed: int) -> set[int]:
    """Documents that the probe and the learned rule are trained on; the same for every lens."""
    train, _ = split(next(iter(seen.evidence.values())), (1 / 3, 2 / 3), seed=seed)
    return set(train.document.tolist())


def _lensed(
    seen: SaturationData, name: str, cost: Cost, cells: int, seed: int
) -> tuple[Lensed, Tensor, TaskProbe]:
    """The rows of one lens, divided; right answers of those not trained on; the probe."""
    whole = seen.evidence[name]
    train, _ = split(whole, (1 / 3, 2 / 3), seed=seed)
    is_train = torch.isin(whole.document, train.document.unique())
    learning, others = numbers(is_train), numbers(~is_train)
    probe = TaskProbe.fit(
        seen.saturation[name].rows(learning), SomeStates(seen.states, learning),
        sampling=CellSampling(tasks=2, limit=cells, seed=seed),
    )  # fmt: skip
    rest = whole.rows(others).with_probe(probe, SomeStates(seen.states, others))
    if len(rest) < 2:
        raise BadSettings(f"{len(rest)} rows are left to judge rules by; read more texts")
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))
    first, second = (rest.rows(half.sort().values) for half in order.tensor_split(2))
    length = 1 + whole.position.double().mean().item()
    families = {
        "task": family(Task, probe=probe), "gap": family(Gap, length=length),
        "similarity": family(Similarity), "patience": family(Patience),
        "learned": Learned.train(train),
    }  # fmt: skip
    rows = Lensed(rest, {}, cost, train, rest, first, second, families)
    return rows, seen.gold[others], probe


def _member(row: Row, families: Mapping[str, Family]) -> Rule:
    if row["rule"] == "oracle":
        return Oracle()
    if row["rule"] == "fixed":
        return Fixed(int(row["knob"]))
    return families[row["rule"]].at(row["knob"])


def _accuracy(rules: list[Rule], evidence: Evidence, gold: Tensor) -> list[Row]:
    """How often rows leave with the right answer, over those whose answer is known."""
    known = gold >= 0
    if not known.any():
        return [{"accuracy": None, "accuracy_low": None, "accuracy_high": None}] * len(rules)
    right = []
    for rule in rules:
        column = replay(rule, evidence).layer.long()[:, None]  # evidence has every layer
        right.append(evidence.top.gather(1, column)[:, 0].long() == gold.long())
    columns = torch.stack(right, 1)[known]
    return [
        {
            "accuracy": one.value, "accuracy_low": finite(one.low),
            "accuracy_high": finite(one.high), "accuracy_rows": one.rows,
        }
        for one in mean_interval(columns, evidence.document[known])
    ]  # fmt: skip
