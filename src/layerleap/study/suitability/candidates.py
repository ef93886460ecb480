"""Candidate exit plans: which rule, through which map, checked at which layers; and the fastest.

A head may cost as much as many blocks, so where to check matters as much as when to stop. Held-out
documents are split: a third trains learned rules and chooses the candidate (half of it each), and
the rest is split by row into rows that calibrate and rows that verify. The candidate is chosen
before the calibration rows are used, so its guarantee needs no correction for the other candidates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch
from torch import Tensor

from layerleap.act.exits.calibration import calibrate, rows_needed, verify
from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import FIRST_EXIT, Evidence, split
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.replay import replay
from layerleap.act.exits.rules import Entropy, Family, Oracle, family
from layerleap.act.exits.timing import Timing
from layerleap.errors import BadSettings, check_choice
from layerleap.lens.intervals import POSITIVE, Documents, Estimate, mean_interval
from layerleap.progress import Progress, silent
from layerleap.study.exits import gap_family
from layerleap.study.result import Row

RULES = (("logit", "gap"), ("linear", "gap"), ("linear", "entropy"), ("linear", "learned"))
RULE_NAMES = {
    "gap": "the paper's gap rule",
    "entropy": "the entropy rule",
    "learned": "a learned rule",
}
TRAIN = 1 / 3  # fraction of documents for training; half of them choose the candidate
FEWEST_DOCUMENTS = 5  # with fewer, the halves of a third cannot both have one


@dataclass(frozen=True)
class Candidate:
    """A kind of rule through a map, checked at some layers."""

    map: str  # "logit" or "linear"
    rule: str
    layers: tuple[int, ...]  # where the rule is checked
    where: str  # the layers in words

    def __post_init__(self) -> None:
        check_choice((self.map, self.rule), RULES, "map and rule of a candidate")

    def __str__(self) -> str:
        return f"{RULE_NAMES[self.rule]} through {self.map}, checked at {self.where}"

    def to_dict(self) -> Row:
        """Plain JSON types."""
        return {**vars(self), "layers": list(self.layers), "words": str(self)}


@dataclass(frozen=True)
class BreakEven:
    """At which head, or which saving, a candidate takes the full model's time."""

    heads: float  # read per answer; the full model reads one
    head_in_blocks: float | None  # most expensive head that loses no time; None: it is irrelevant
    saved: float  # time saved by skipping blocks, in mean blocks
    saved_needed: float  # the saving at which it breaks even


def named(name: str, estimate: Estimate) -> Row:
    """An estimate in a row that has several: `name`, `name_low` and `name_high`."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Held-out rows by use; each part by map, for the same rows."""

    train: Mapping[str, Evidence]  # trains learned rules once the candidate is chosen
    train_half: Mapping[str, Evidence]  # half of `train`, for the rules to choose between
    choose: Mapping[str, Evidence]  # the other half, which chooses
    calibrate: Mapping[str, Evidence]
    verify: Mapping[str, Evidence]

    def counts(self) -> list[Row]:
        """Rows and documents of each part."""
        parts = {name: by["linear"] for name, by in vars(self).items() if name != "train_half"}
        counts = {name: (len(rows), len(rows.document.unique())) for name, rows in parts.items()}
        return [{"part": part, "rows": n, "documents": m} for part, (n, m) in counts.items()]


@dataclass(frozen=True, eq=False)
class Prices:
    """What an answer costs: measured seconds and counted FLOPs."""

    timing: Timing
    flops: Mapping[str, Cost]  # by map

    def seconds(self, candidate: Candidate, exits: Tensor) -> Tensor:
        """(row,): seconds of rows that exit at these layers."""
        return self.timing.by_layer(candidate.layers, carried=candidate.map == "linear")[exits]


def divide(
    evidence: Mapping[str, Evidence], tolerance: float, delta: float, *, seed: int = 0
) -> SplitRows:
    """The held-out rows by use; refuses too few rows with the number that is needed."""
    any_map = next(iter(evidence.values()))
    require_enough(len(any_map), len(any_map.document.unique()), tolerance, delta)
    by_map = []
    for rows in evidence.values():  # splits depend on documents alone: the same for each map
        train, rest = split(rows, (TRAIN, 1 - TRAIN), seed=seed)
        halves = split(train, (0.5, 0.5), seed=seed)
        by_map.append((train, *halves, *split(rest, (0.5, 0.5), seed=seed, by="row")))
    by_use = zip(*by_map, strict=True)
    rows_by_use = SplitRows(*(dict(zip(evidence, rows, strict=True)) for rows in by_use))
    counts = {row["part"]: row["rows"] for row in rows_by_use.counts()}
    if any(counts[part] < needed for part, needed in _needs(tolerance, delta).items()):
        _refuse(len(any_map), tolerance, delta)
    return rows_by_use


def require_enough(rows: int, documents: int, tolerance: float, delta: float) -> None:
    """Refuse held-out text that is too small, however it is split."""
    if documents < FEWEST_DOCUMENTS:
        raise BadSettings(
            f"{rows} rows of {documents} held-out documents cannot be split by document into "
            f"training, choosing and testing; at least {FEWEST_DOCUMENTS} held-out documents are "
            "needed: use more documents, or hold out a larger fraction of them"
        )
    if rows < sum(_needs(tolerance, delta).values()):
        _refuse(rows, tolerance, delta)


def _needs(tolerance: float, delta: float) -> dict[str, int]:
    """By part, the smallest number of rows with which a rule can pass."""
    chooses = rows_needed(tolerance, None, "crc")
    return {"calibrate": rows_needed(tolerance, delta), "choose": chooses}


def _refuse(rows: int, tolerance: float, delta: float) -> NoReturn:
    needs = _needs(tolerance, delta)
    total = max(3 * needs["calibrate"], 6 * needs["choose"])  # a third calibrates, a sixth chooses
    raise BadSettings(
        f"{rows} held-out rows are too few: a tolerance of {tolerance:g} with confidence "
        f"{1 - delta:g} needs {needs['calibrate']} to calibrate and {needs['choose']} to choose, "
        f"about {total} in total; read more texts, use more text, or a larger tolerance"
    )


def layer_sets(n_layers: int) -> dict[str, tuple[int, ...]]:
    """Sets of layers to check, by name: all, the last half, every 2nd, 4th, ..., single layers."""
    if n_layers <= FIRST_EXIT:
        raise BadSettings(
            f"a model with {n_layers} layer cannot exit early; expected at least 2 layers"
        )
    every = tuple(range(FIRST_EXIT, n_layers))
    named = {"all layers": every, "last half": every[len(every) // 2 :]}
    for step in (2**n for n in range(1, (n_layers - 1).bit_length())):
        ordinal = f"{step}{'nd' if step == 2 else 'th'}"
        named[f"every {ordinal} layer"] = tuple(range(step, n_layers, step))
    named |= {f"layer {layer}": (layer,) for layer in every}
    first: dict[tuple[int, ...], str] = {}
    for name, layers in named.items():
        # A set of one layer is named by its number, whichever way it came about.
        first.setdefault(layers, name if len(layers) > 1 else f"layer {layers[0]}")
    return {name: layers for layers, name in first.items()}


def all_candidates(n_layers: int) -> list[Candidate]:
    """Every rule at every set of layers."""
    sets = layer_sets(n_layers).items()
    return [Candidate(map_, rule, layers, name) for name, layers in sets for map_, rule in RULES]


def checked_everywhere(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each rule checked at every layer, as in the paper."""
    most = max(len(candidate.layers) for candidate in candidates)
    return [candidate for candidate in candidates if len(candidate.layers) == most]


def family_of(candidate: Candidate, training: Evidence) -> Family:
    """The rules of a candidate; anything they learn comes from the training rows alone."""
    if candidate.rule == "learned":
        return Learned.train(training.at(candidate.layers))
    if candidate.rule == "entropy":
        return family(Entropy)
    return gap_family(training)


def dry_run(
    candidates: Sequence[Candidate],
    rows: SplitRows,
    prices: Prices,
    tolerance: float,
    progress: Progress = silent,
) -> list[Row]:
    """Each candidate with its expected time and layers saved, on the rows that choose.

    Thresholds are set by conformal risk control, which needs fewer rows than a guarantee with
    confidence. A candidate that lets no row exit takes the full model's time, as it is not used.
    """
    runs = []
    for n, candidate in enumerate(candidates):
        choose = rows.choose[candidate.map].at(candidate.layers)
        rules = family_of(candidate, rows.train_half[candidate.map])
        rule = calibrate(rules, choose, tolerance, method="crc").rule
        run = {"exits": rule is not None, "time": 1.0, "saved": 0.0}
        if rule is not None:
            exits = replay(rule, choose)
            seconds = prices.seconds(candidate, exits.layer).mean().item()
            run |= {"time": seconds / prices.timing.full, "saved": exits.saved}
        runs.append({**candidate.to_dict(), **run})
        progress("comparing plans", n + 1, len(candidates), "plans")
    return runs


def fastest(candidates: Sequence[Candidate], runs: Sequence[Row]) -> Candidate | None:
    """The candidate with the least time among those that exit; None if there is none.

    Ties go to the candidate with fewer layers to check.
    """
    exiting = [both for both in zip(candidates, runs, strict=True) if both[1]["exits"]]
    best = min(exiting, key=lambda both: (both[1]["time"], len(both[0].layers)), default=None)
    return None if best is None else best[0]


def outcome(
    candidate: Candidate, rows: SplitRows, prices: Prices, tolerance: float, delta: float
) -> Row:
    """Calibrate the candidate and test it on fresh rows: savings, disagreement, time."""
    rules = family_of(candidate, rows.train[candidate.map])
    to_calibrate = rows.calibrate[candidate.map].at(candidate.layers)
    calibrated = calibrate(rules, to_calibrate, tolerance, delta=delta)
    fresh, rule = rows.verify[candidate.map].at(candidate.layers), calibrated.rule
    verified = verify(calibrated, fresh).to_dict()
    del verified["layers"]  # the mean layer of exits; `saved` says as much
    costs: Row = {"time": 1.0, "time_low": 1.0, "time_high": 1.0, "flops": 1.0, "break_even": None}
    if rule is not None:
        exits, cost = replay(rule, fresh), prices.flops[candidate.map]
        time = prices.seconds(candidate, exits.layer) / prices.timing.full
        costs = {
            **named("time", mean_interval(time[:, None], fresh.document, POSITIVE)[0]),
            "flops": cost.of(exits, rule, candidate.layers) / cost.full,
            "break_even": asdict(break_even(candidate, prices.timing, exits.layer)),
        }
    return {
        **candidate.to_dict(),
        "exits": rule is not None,
        "threshold": None if rule is None else getattr(rule, rule.knob),  # type: ignore[attr-defined]
        **verified,
        **costs,
        "calibrated": calibrated.to_dict(),
    }


def break_even(candidate: Candidate, timing: Timing, exits: Tensor) -> BreakEven:
    """At which head, or which saving, rows with these exits take the full model's time.

    Seconds are linear in those of the head: skipped blocks must pay for maps and checks, and for
    the heads beyond the one that the full model reads too.
    """
    carried = candidate.map == "linear"
    without, with_one = (
        timing.by_layer(candidate.layers, carried=carried, head=head)[exits].mean().item()
        for head in (0.0, 1.0)
    )
    heads = with_one - without
    by_layer = torch.tensor([0.0, *timing.blocks], dtype=torch.float64).cumsum(0)
    blocks = by_layer[exits].mean().item()
    saved, checks = sum(timing.blocks) - blocks, without - blocks
    extra = heads - 1
    most = None if extra < 1e-9 else max(0.0, (saved - checks) / extra) / timing.block
    needed = (checks + extra * timing.head) / timing.block
    return BreakEven(heads, most, saved / timing.block, needed)


def ceilings(evidence: Mapping[str, Evidence], timing: Timing) -> list[Row]:
    """By map: the layers and time of an oracle whose checks are free, the bound for all rules."""
    bounds = []
    for name, rows in evidence.items():
        exits = replay(Oracle(), rows)
        seconds = timing.by_layer((), carried=name == "linear", reads=False)[exits.layer]
        # The oracle also knows when an early exit does not pay off.
        time = (seconds / timing.full).clamp_max(1.0)
        saved, documents = exits.n_layers - exits.layer.double(), Documents(rows.document)
        (most,) = documents.means(saved[:, None], (0.0, float(exits.n_layers)))
        (least,) = documents.means(time[:, None], (0.0, 1.0))
        sample = {"rows": most.rows, "documents": most.documents}
        bounds.append({"map": name, **named("saved", most), **named("time", least), **sample})
    return bounds
