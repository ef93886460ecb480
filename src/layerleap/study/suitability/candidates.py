"""Candidate exit plans: which rule, through which map, checked at which layers; and the fastest.

A head may cost as much as many blocks, so where to check matters as much as when to stop. Held-out
documents are split: a third trains learned rules and chooses the candidate (half of it each), and
the rest is split by row into rows that calibrate and rows that verify. The candidate is chosen
before the calibration rows are used, so its guarantee needs no correction for the other candidates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from layerleap.act.exits.calibration import Calibrated, Verified, calibrate, rows_needed, verify
from layerleap.act.exits.cost import Cost
from layerleap.act.exits.evidence import FIRST_EXIT, Evidence, split
from layerleap.act.exits.families import Family, family
from layerleap.act.exits.learned import Learned
from layerleap.act.exits.replay import replay
from layerleap.act.exits.rules import Entropy, Gap, Oracle
from layerleap.act.exits.timing import Timing
from layerleap.errors import BadSettings, check_choice
from layerleap.lens.intervals import POSITIVE, Documents, Estimate, mean_interval
from layerleap.progress import Progress, silent

RULES = (("id", "gap"), ("mat", "gap"), ("mat", "entropy"), ("mat", "learned"))
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

    map: str  # "id" or "mat"
    rule: str
    layers: tuple[int, ...]  # where the rule is checked
    where: str  # the layers in words

    def __post_init__(self) -> None:
        check_choice((self.map, self.rule), RULES, "map and rule of a candidate")

    def __str__(self) -> str:
        return f"{RULE_NAMES[self.rule]} through {self.map}, checked at {self.where}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "layers": list(self.layers)}


@dataclass(frozen=True)
class DryRun:
    """A candidate on the rows that choose; time as a fraction of the full model's."""

    candidate: Candidate
    exits: bool  # False: no threshold is safe enough, so the full model runs
    time: float
    saved: float  # mean layers

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with those of the candidate among them."""
        own = {key: value for key, value in vars(self).items() if key != "candidate"}
        return {**self.candidate.to_dict(), **own}


@dataclass(frozen=True)
class BreakEven:
    """At which head, or which saving, a candidate takes the full model's time."""

    heads: float  # read per answer; the full model reads one
    head_in_blocks: float | None  # most expensive head that loses no time; None: it is irrelevant
    saved: float  # time saved by skipping blocks, in mean blocks
    saved_needed: float  # the saving at which it breaks even


@dataclass(frozen=True)
class Outcome:
    """A candidate, calibrated and then tested on fresh rows."""

    candidate: Candidate
    calibrated: Calibrated
    verified: Verified
    time: Estimate  # fraction of the full model's time
    flops: float  # fraction of its FLOPs
    break_even: BreakEven | None  # None if it never exits

    @property
    def exits(self) -> bool:
        """False if no threshold keeps the guarantee."""
        return self.calibrated.rule is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        rule = self.calibrated.rule
        return {
            **self.candidate.to_dict(),
            "exits": self.exits,
            "summary": "never exit" if rule is None else str(rule),
            "calibrated": self.calibrated.to_dict(),
            "verified": self.verified.to_dict(),
            "time": asdict(self.time),
            "flops": self.flops,
            "break_even": None if self.break_even is None else asdict(self.break_even),
        }

    def flat(self) -> dict[str, Any]:
        """One row of a table: the candidate, and how it did on fresh rows."""
        verified, time = self.verified, self.time
        return {
            **self.candidate.to_dict(),
            "exits": self.exits,
            "saved": verified.saved,
            "disagreement": verified.disagreement,
            "flops": self.flops,
            "time": time.value,
            "time_low": time.low,
            "time_high": time.high,
        }


@dataclass(frozen=True)
class Ceiling:
    """What an oracle saves through one map: the upper bound for all rules."""

    map: str
    saved: Estimate  # layers
    time: Estimate  # fraction of the full model's time


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Held-out rows by use; each part by map, for the same rows."""

    train: Mapping[str, Evidence]  # trains learned rules once the candidate is chosen
    train_half: Mapping[str, Evidence]  # half of `train`, for the rules to choose between
    choose: Mapping[str, Evidence]  # the other half, which chooses
    calibrate: Mapping[str, Evidence]
    verify: Mapping[str, Evidence]

    def counts(self) -> dict[str, dict[str, int]]:
        """Rows and documents of each part."""
        parts = ((part, by["mat"]) for part, by in vars(self).items() if part != "train_half")
        return {part: {"rows": len(e), "documents": len(e.document.unique())} for part, e in parts}


@dataclass(frozen=True, eq=False)
class Prices:
    """What an answer costs: measured seconds and counted FLOPs."""

    timing: Timing
    flops: Mapping[str, Cost]  # by map

    def seconds(self, candidate: Candidate, exits: Tensor) -> Tensor:
        """(row,): seconds of rows that exit at these layers."""
        return self.timing.by_layer(candidate.layers, carried=candidate.map == "mat")[exits]


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
    rows_by_use = SplitRows(*(dict(zip(evidence, own, strict=True)) for own in by_use))
    counts = {part: count["rows"] for part, count in rows_by_use.counts().items()}
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
    return {
        "calibrate": rows_needed(tolerance, delta),
        "choose": rows_needed(tolerance, None, "crc"),
    }


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
    return family(Gap, length=1 + training.position.double().mean().item())


def dry_run(
    candidates: Sequence[Candidate],
    rows: SplitRows,
    prices: Prices,
    tolerance: float,
    progress: Progress = silent,
) -> list[DryRun]:
    """Each candidate's expected time on the rows that choose.

    Thresholds are set by conformal risk control, which needs fewer rows than a guarantee with
    confidence. A candidate that lets no row exit takes the full model's time, as it is not used.
    """
    runs = []
    for n, candidate in enumerate(candidates):
        choose = rows.choose[candidate.map].at(candidate.layers)
        rules = family_of(candidate, rows.train_half[candidate.map])
        rule = calibrate(rules, choose, tolerance, method="crc").rule
        time, saved = 1.0, 0.0
        if rule is not None:
            exits = replay(rule, choose)
            seconds = prices.seconds(candidate, exits.layer).mean().item()
            time, saved = seconds / prices.timing.full, exits.saved
        runs.append(DryRun(candidate, rule is not None, time, saved))
        progress("comparing plans", n + 1, len(candidates), "plans")
    return runs


def fastest(runs: Sequence[DryRun]) -> Candidate | None:
    """The candidate with the least time among those that exit; None if there is none.

    Ties go to the candidate with fewer layers to check.
    """
    exiting = [run for run in runs if run.exits]
    best = min(exiting, key=lambda run: (run.time, len(run.candidate.layers)), default=None)
    return None if best is None else best.candidate


def outcome(
    candidate: Candidate, rows: SplitRows, prices: Prices, tolerance: float, delta: float
) -> Outcome:
    """Calibrate the candidate and test it on fresh rows: savings, disagreement, time."""
    rules = family_of(candidate, rows.train[candidate.map])
    to_calibrate = rows.calibrate[candidate.map].at(candidate.layers)
    calibrated = calibrate(rules, to_calibrate, tolerance, delta=delta)
    fresh = rows.verify[candidate.map].at(candidate.layers)
    verified = verify(calibrated, fresh)
    if calibrated.rule is None:
        full = Estimate(1.0, 1.0, 1.0, verified.rows, verified.documents)
        return Outcome(candidate, calibrated, verified, full, 1.0, None)
    exits = replay(calibrated.rule, fresh)
    time = prices.seconds(candidate, exits.layer) / prices.timing.full
    cost = prices.flops[candidate.map]
    return Outcome(
        candidate,
        calibrated,
        verified,
        mean_interval(time[:, None], fresh.document, POSITIVE)[0],
        cost.of(exits, calibrated.rule, candidate.layers) / cost.full,
        break_even(candidate, prices.timing, exits.layer),
    )


def break_even(candidate: Candidate, timing: Timing, exits: Tensor) -> BreakEven:
    """At which head, or which saving, rows with these exits take the full model's time.

    Seconds are linear in those of the head: skipped blocks must pay for maps and checks, and for
    the heads beyond the one that the full model reads too.
    """
    carried = candidate.map == "mat"
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


def ceilings(evidence: Mapping[str, Evidence], timing: Timing) -> list[Ceiling]:
    """By map: the layers and time of an oracle whose checks are free."""
    bounds = []
    for name, rows in evidence.items():
        exits = replay(Oracle(), rows)
        seconds = timing.by_layer((), carried=name == "mat", reads=False)[exits.layer]
        # The oracle also knows when an early exit does not pay off.
        time = (seconds / timing.full).clamp_max(1.0)
        saved, documents = exits.n_layers - exits.layer.double(), Documents(rows.document)
        (most,) = documents.means(saved[:, None], (0.0, float(exits.n_layers)))
        bounds.append(Ceiling(name, most, *documents.means(time[:, None], (0.0, 1.0))))
    return bounds
