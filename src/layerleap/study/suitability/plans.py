"""Plans of early exit: which rule, through which map, checked at which layers; the quickest one.

In: `Evidence` of both maps over the same held-out rows, prices in seconds and FLOPs, a tolerance.
Out: how calibrated rules do on fresh rows, and the plan that promises the shortest time.

A head may cost as much as many blocks, so where to check matters as much as when to stop. The
held-out documents are divided: a third trains learned rules and chooses the plan (half of it each),
the rest is divided by row into rows that calibrate and rows that verify. As the plan is chosen
before calibration rows are looked at, its promise needs no correction for the plans not taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from layerleap.act.exits.calibration import Calibrated, calibrate, rows_needed, verify
from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import FIRST_EXIT, Evidence, split
from layerleap.act.exits.families import Family, family
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.replay import replay
from layerleap.act.exits.rules import Entropy, Gap, Oracle
from layerleap.act.exits.timing import Timing
from layerleap.errors import BadSettings
from layerleap.progress import Progress, silent
from layerleap.read.metrics import Bootstrap, Estimate

RULES = (("id", "gap"), ("mat", "gap"), ("mat", "entropy"), ("mat", "learned"))
TRAIN = 1 / 3  # share of the documents; half of them choose the plan
FEWEST_DOCUMENTS = 5  # with fewer, the halves of a third cannot both have one


@dataclass(frozen=True)
class ExitPlan:
    """A rule through a map, checked at some layers."""

    map: str  # "id" or "mat"
    rule: str
    layers: tuple[int, ...]  # where it is checked
    name: str  # of the layers

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "layers": list(self.layers)}


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Held-out rows by what they are used for; each by map, of the same rows."""

    train: Mapping[str, Evidence]  # learned rules, once the plan is chosen
    half: Mapping[str, Evidence]  # the part of them that trains the rules to choose between
    judge: Mapping[str, Evidence]  # the other part, which chooses
    calibrate: Mapping[str, Evidence]
    verify: Mapping[str, Evidence]

    def counts(self) -> dict[str, dict[str, int]]:
        """SplitRows and documents of each part."""
        parts = ((part, by["mat"]) for part, by in vars(self).items() if part != "half")
        return {part: {"rows": len(e), "documents": len(e.document.unique())} for part, e in parts}


@dataclass(frozen=True, eq=False)
class Costs:
    """What an answer costs on this machine and in principle."""

    clock: Timing
    flops: Mapping[str, Cost]  # by map

    def seconds(self, plan: ExitPlan, exits: Tensor) -> Tensor:
        """(row,) for rows that leave at these layers."""
        return self.clock.by_layer(plan.layers, carried=plan.map == "mat")[exits]


def divide(
    evidence: Mapping[str, Evidence], tolerance: float, delta: float, *, seed: int = 0
) -> SplitRows:
    """The held-out rows by use; too few of them is an error that says how many are needed."""
    any_map = next(iter(evidence.values()))
    require_enough(len(any_map), len(any_map.document.unique()), tolerance, delta)
    parts: dict[str, dict[str, Evidence]] = {}
    for name, rows in evidence.items():  # the same rows of each: a split rests on documents alone
        train, rest = split(rows, (TRAIN, 1 - TRAIN), seed=seed)
        half, judge = split(train, (0.5, 0.5), seed=seed)
        to_calibrate, to_verify = split(rest, (0.5, 0.5), seed=seed, by="row")
        used = {
            "train": train, "half": half, "judge": judge,
            "calibrate": to_calibrate, "verify": to_verify,
        }  # fmt: skip
        for part, value in used.items():
            parts.setdefault(part, {})[name] = value
    found = SplitRows(**parts)
    counts = {part: count["rows"] for part, count in found.counts().items()}
    if any(counts[part] < wanted for part, wanted in _needs(tolerance, delta).items()):
        _refuse(len(any_map), tolerance, delta)
    return found


def require_enough(rows: int, documents: int, tolerance: float, delta: float) -> None:
    """Refuse held-out text that cannot do, however it is divided."""
    if documents < FEWEST_DOCUMENTS:
        raise BadSettings(
            f"{rows} rows of {documents} held-out documents cannot be divided into training, "
            f"choosing and testing by document; at least {FEWEST_DOCUMENTS} held-out documents "
            "are needed: give more documents, or hold out a larger share of them"
        )
    if rows < sum(_needs(tolerance, delta).values()):
        _refuse(rows, tolerance, delta)


def _needs(tolerance: float, delta: float) -> dict[str, int]:
    """The fewest rows with which a rule could pass, by part."""
    return {
        "calibrate": rows_needed(tolerance, delta),
        "judge": rows_needed(tolerance, None, "crc"),
    }


def _refuse(rows: int, tolerance: float, delta: float) -> NoReturn:
    needs = _needs(tolerance, delta)
    total = max(3 * needs["calibrate"], 6 * needs["judge"])  # a third calibrates, a sixth chooses
    raise BadSettings(
        f"{rows} held-out rows are too few: a tolerance of {tolerance:g} with confidence "
        f"{1 - delta:g} needs {needs['calibrate']} to calibrate on and {needs['judge']} to choose "
        f"with, so about {total} in all; read more texts, give more text, or allow more"
    )


def layer_sets(n_layers: int) -> dict[str, tuple[int, ...]]:
    """Where one may check: everywhere, in the last half, at every 2nd, 4th, ..., at one layer."""
    if n_layers <= FIRST_EXIT:
        raise BadSettings(f"a model with {n_layers} layer has none to leave early from")
    every = tuple(range(FIRST_EXIT, n_layers))
    named = {"all layers": every, "last half": every[len(every) // 2 :]}
    step = 2
    while step < n_layers:
        ending = "nd" if step == 2 else "th"
        named[f"every {step}{ending} layer"] = tuple(range(step, n_layers, step))
        step *= 2
    named |= {f"layer {layer}": (layer,) for layer in every}
    first: dict[tuple[int, ...], str] = {}
    for name, layers in named.items():
        # One layer alone is called by its number, however it came about.
        first.setdefault(layers, name if len(layers) > 1 else f"layer {layers[0]}")
    return {name: layers for layers, name in first.items()}


def all_plans(n_layers: int) -> list[ExitPlan]:
    """Every rule at every set of layers."""
    sets = layer_sets(n_layers).items()
    return [ExitPlan(map_, rule, layers, name) for name, layers in sets for map_, rule in RULES]


def everywhere(plans: Sequence[ExitPlan]) -> list[ExitPlan]:
    """Each rule checked at every layer, as in the paper."""
    most = max(len(plan.layers) for plan in plans)
    return [plan for plan in plans if len(plan.layers) == most]


def family_of(plan: ExitPlan, training: Evidence) -> Family:
    """The rules of a plan; what they have to learn comes from the training rows alone."""
    if plan.rule == "learned":
        return Learned.train(training.at(plan.layers))
    if plan.rule == "entropy":
        return family(Entropy)
    return family(Gap, length=1 + training.position.double().mean().item())


def compare(
    plans: Sequence[ExitPlan],
    rows: SplitRows,
    prices: Costs,
    tolerance: float,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """Each plan's expected time on the rows that choose, as a share of the full model's.

    A dry run: thresholds are set by risk control, which needs fewer rows than a promise does.
    A plan under which no row may leave takes the full model's time, for it is not used.
    """
    found = []
    for n, plan in enumerate(plans):
        judge = rows.judge[plan.map].at(plan.layers)
        rules = family_of(plan, rows.half[plan.map])
        rule = calibrate(rules, judge, tolerance, method="crc").rule
        time, saved = 1.0, 0.0
        if rule is not None:
            exits = replay(rule, judge)
            time = prices.seconds(plan, exits.layer).mean().item() / prices.clock.full
            saved = exits.saved
        found.append({**plan.to_dict(), "exits": rule is not None, "time": time, "saved": saved})
        progress("comparing plans", n + 1, len(plans), "plans")
    return found


def quickest(plans: Sequence[ExitPlan], compared: Sequence[Mapping[str, Any]]) -> ExitPlan | None:
    """Of the plans under which rows leave, the one of least time; None if there is none.

    Of equal ones it is that with the fewest layers to check.
    """
    order = sorted(range(len(plans)), key=lambda n: (compared[n]["time"], len(plans[n].layers)))
    return next((plans[n] for n in order if compared[n]["exits"]), None)


def outcome(
    plan: ExitPlan, rows: SplitRows, prices: Costs, tolerance: float, delta: float, *, seed: int = 0
) -> dict[str, Any]:
    """The plan calibrated, then tried on fresh rows: what it saves, disagrees and takes."""
    rules = family_of(plan, rows.train[plan.map])
    calibrated = calibrate(rules, rows.calibrate[plan.map].at(plan.layers), tolerance, delta=delta)
    fresh = rows.verify[plan.map].at(plan.layers)
    verified = verify(calibrated, fresh, seed=seed)
    said = {
        **plan.to_dict(), "exits": calibrated.rule is not None,
        "says": "exit nowhere" if calibrated.rule is None else str(calibrated.rule),
        "calibrated": calibrated.to_dict(), "verified": verified.to_dict(),
    }  # fmt: skip
    return {**said, **_prices_of(plan, calibrated, fresh, prices, seed)}


def _prices_of(
    plan: ExitPlan, calibrated: Calibrated, fresh: Evidence, prices: Costs, seed: int
) -> dict[str, Any]:
    """Time and FLOPs as shares of the full model's, and where the time would break even."""
    if calibrated.rule is None:
        whole = Estimate(1.0, 1.0, 1.0, len(fresh), len(fresh.document.unique()))
        return {"time": dict(vars(whole)), "flops": 1.0, "break_even": None}
    exits = replay(calibrated.rule, fresh)
    share = prices.seconds(plan, exits.layer) / prices.clock.full
    cost = prices.flops[plan.map]
    return {
        "time": dict(vars(Bootstrap(fresh.document, seed=seed).estimates(share[:, None])[0])),
        "flops": cost.of(exits, calibrated.rule, plan.layers) / cost.full,
        "break_even": break_even(plan, prices.clock, exits.layer),
    }


def break_even(plan: ExitPlan, clock: Timing, exits: Tensor) -> dict[str, float | None]:
    """At which head, or which saving, rows that leave at these layers take the full model's time.

    Seconds are linear in the head's: what is saved in blocks must pay for maps and looks, and for
    the heads beyond the one that the full model runs too.
    """
    carried = plan.map == "mat"
    without = clock.by_layer(plan.layers, carried=carried, head=0.0)[exits].mean().item()
    heads = clock.by_layer(plan.layers, carried=carried, head=1.0)[exits].mean().item() - without
    blocks = torch.tensor([0.0, *clock.blocks], dtype=torch.float64).cumsum(0)
    saved = sum(clock.blocks) - blocks[exits].mean().item()
    looks = without - blocks[exits].mean().item()
    extra = heads - 1
    left = saved - looks
    most = None if extra < 1e-9 else max(0.0, left / extra) / clock.block
    return {
        "heads": heads,  # evaluated per answer; the full model runs one
        "head_in_blocks": most,  # the dearest that loses no time; None: its price does not matter
        "saved": saved / clock.block,  # mean blocks' worth of time not run
        "saved_needed": (looks + extra * clock.head) / clock.block,
    }


def ceiling(
    evidence: Mapping[str, Evidence], clock: Timing, *, seed: int = 0
) -> list[dict[str, Any]]:
    """By map: layers and time that a rule would save that knew the answer, its checks free."""
    found = []
    for name, rows in evidence.items():
        exits = replay(Oracle(), rows)
        seconds = clock.by_layer((), carried=name == "mat", reads=False)[exits.layer]
        # It may know as well that leaving does not pay.
        share = (seconds / clock.full).clamp_max(1.0)
        both = torch.stack([exits.n_layers - exits.layer.double(), share], 1)
        saved, time = Bootstrap(rows.document, seed=seed).estimates(both)
        found.append({"map": name, "saved": dict(vars(saved)), "time": dict(vars(time))})
    return found
