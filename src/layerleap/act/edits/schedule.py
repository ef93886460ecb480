"""Schedules: real blocks and linear jumps in turn, from the first layer to the last.

In: the number of layers, and for the best schedule the R2 of every jump.
Out: `Schedule`s, which `ScheduleScores` runs.

The second version of "Jump to Conclusions" (arXiv 2303.09435) asks whether a few blocks spread over
the model beat the same number of blocks followed by one jump. A jump is taken at all positions,
because the blocks after it attend to all of them.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, product
from typing import Literal

from layerleap.errors import BadSettings, check_choice

Kind = Literal["run", "jump"]
Ends = tuple[tuple[Kind, int], ...]  # kinds of segments, and the layers that they lead to


@dataclass(frozen=True)
class Segment:
    """Layers `src` to `dst`, either run block by block or skipped by one map."""

    kind: Kind
    src: int
    dst: int

    def __post_init__(self) -> None:
        check_choice(self.kind, Kind, "the kind of a segment")


@dataclass(frozen=True)
class Schedule:
    """Segments that lead from layer 0 to the last without a gap."""

    name: str
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        reached = 0
        for segment in self.segments:
            if segment.src != reached or segment.dst <= segment.src:
                raise BadSettings(
                    f"schedule {self.name!r} goes from layer {segment.src} to {segment.dst} after "
                    f"reaching layer {reached}; each segment must start where the last one ended"
                )
            reached = segment.dst

    @property
    def n_layers(self) -> int:
        """The layer it leads to."""
        return self.segments[-1].dst if self.segments else 0

    @property
    def blocks(self) -> int:
        """How many blocks it runs: its cost."""
        return sum(s.dst - s.src for s in self.segments if s.kind == "run")

    @property
    def jumps(self) -> tuple[tuple[int, int], ...]:
        """The pairs of layers that it jumps between."""
        return tuple((s.src, s.dst) for s in self.segments if s.kind == "jump")

    def __str__(self) -> str:
        signs = {"run": "-", "jump": "~"}
        return "0" + "".join(f"{signs[s.kind]}{s.dst}" for s in self.segments)


def single_jump(n_layers: int, blocks: int) -> Schedule:
    """Run the first `blocks` blocks, then jump to the end: a shortcut at a fixed layer."""
    _check_blocks(n_layers, blocks)
    return _schedule(f"jump after {blocks}", (("run", blocks), ("jump", n_layers)))


def round_robin(n_layers: int, run: int, jump: int) -> Schedule:
    """Run `run` blocks, jump over the next `jump`, and so on; `run + jump` divides the layers."""
    if min(run, jump) < 1 or n_layers % (run + jump):
        raise BadSettings(
            f"turns of {run} blocks run and {jump} skipped do not divide {n_layers} layers evenly; "
            "expected both to be 1 or more, and their sum to divide the number of layers"
        )
    ends: Ends = ()
    for start in range(0, n_layers, run + jump):
        ends += (("run", start + run), ("jump", start + run + jump))
    return _schedule(f"{run} run, {jump} jumped", ends)


def round_robins(n_layers: int) -> list[Schedule]:
    """Every weighted round-robin with two turns or more."""
    turns = [t for t in range(2, n_layers // 2 + 1) if n_layers % t == 0]
    return [round_robin(n_layers, run, turn - run) for turn in turns for run in range(1, turn)]


def best_schedule(r2: Mapping[tuple[int, int], float], n_layers: int, blocks: int) -> Schedule:
    """The schedule of exactly that many blocks whose jumps have the largest product of R2.

    Exact, by dynamic programming over (layer reached, blocks used, was the last segment a jump).
    Two jumps never follow each other directly, because one map can do both. A jump whose R2 is not
    above 0 explains nothing and is never taken.

    Args:
        r2: by (src, dst).
        n_layers: layers of the model.
        blocks: how many blocks to run.
    """
    _check_blocks(n_layers, blocks)
    log_r2 = {pair: math.log(value) for pair, value in r2.items() if value > 0}
    best: dict[tuple[int, int, bool], tuple[float, Ends]] = {(0, 0, False): (0.0, ())}

    def reach(state: tuple[int, int, bool], value: float, ends: Ends) -> None:
        if state not in best or value > best[state][0]:
            best[state] = value, ends

    for layer in range(n_layers):
        for used, jumped in product(range(min(layer, blocks) + 1), (False, True)):
            if (layer, used, jumped) not in best:
                continue
            value, ends = best[layer, used, jumped]
            if used < blocks:
                reach((layer + 1, used + 1, False), value, (*ends, ("run", layer + 1)))
            for dst in range(layer + 1, n_layers + 1) if not jumped else ():
                if (layer, dst) in log_r2:
                    reach((dst, used, True), value + log_r2[layer, dst], (*ends, ("jump", dst)))
    arrived = [best[end] for last in (False, True) if (end := (n_layers, blocks, last)) in best]
    if not arrived:
        raise BadSettings(
            f"no schedule of {blocks} blocks reaches layer {n_layers}: the jumps that it needs "
            "have no R2 above 0"
        )
    return _schedule(f"best R2, {blocks} blocks", max(arrived, key=lambda found: found[0])[1])


def best_schedules(
    r2: Mapping[tuple[int, int], float], n_layers: int, budgets: Iterable[int]
) -> list[Schedule]:
    """`best_schedule` for each number of blocks; those that no jumps allow are left out."""
    schedules = []
    for blocks in budgets:
        with suppress(BadSettings):
            schedules.append(best_schedule(r2, n_layers, blocks))
    return schedules


def _schedule(name: str, ends: Ends) -> Schedule:
    """A schedule given by where its segments end; neighbours are joined, empty ones left out."""
    segments, reached = [], 0
    for kind, group in groupby(ends, key=lambda segment: segment[0]):
        *_, (_, end) = group
        if end > reached:
            segments.append(Segment(kind, reached, end))
            reached = end
    return Schedule(name, tuple(segments))


def _check_blocks(n_layers: int, blocks: int) -> None:
    if not 0 <= blocks <= n_layers:
        raise BadSettings(f"cannot run {blocks} blocks: this model has {n_layers}")
