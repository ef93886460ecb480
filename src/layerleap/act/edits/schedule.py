"""Schedules: real blocks and linear jumps in turn, from the first layer to the last.

In: the number of layers, and for the best schedule the R2 of every jump.
Out: `Schedule`s, which `schedule_scores` runs.

The second version of "Jump to Conclusions" (arXiv 2303.09435) asks whether a few blocks spread over
the model beat the same number of blocks followed by one jump. A jump is taken at all positions,
because the blocks after it attend to all of them.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from layerleap.errors import BadSettings


@dataclass(frozen=True)
class Segment:
    """Layers `src` to `dst`, either run block by block or skipped by one map."""

    kind: Literal["run", "jump"]
    src: int
    dst: int


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
    return _schedule(f"jump after {blocks}", [("run", blocks), ("jump", n_layers)])


def round_robin(n_layers: int, run: int, jump: int) -> Schedule:
    """Run `run` blocks, jump over the next `jump`, and so on; `run + jump` divides the layers."""
    if min(run, jump) < 1 or n_layers % (run + jump):
        raise BadSettings(
            f"turns of {run} blocks run and {jump} skipped do not divide {n_layers} layers evenly; "
            "expected both to be 1 or more, and their sum to divide the number of layers"
        )
    ends: list[tuple[Literal["run", "jump"], int]] = []
    for start in range(0, n_layers, run + jump):
        ends += [("run", start + run), ("jump", start + run + jump)]
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
    best: dict[tuple[int, int, bool], tuple[float, tuple[int, int, bool] | None]]
    best = {(0, 0, False): (0.0, None)}
    for layer in range(n_layers):
        for used in range(min(layer, blocks) + 1):
            for jumped in (False, True):
                state = (layer, used, jumped)
                if state not in best:
                    continue
                value = best[state][0]
                if used < blocks:
                    _improve(best, (layer + 1, used + 1, False), value, state)
                for dst in range(layer + 1, n_layers + 1) if not jumped else ():
                    if (layer, dst) in log_r2:
                        _improve(best, (dst, used, True), value + log_r2[layer, dst], state)
    ends = [state for last in (False, True) if (state := (n_layers, blocks, last)) in best]
    if not ends:
        raise BadSettings(
            f"no schedule of {blocks} blocks reaches layer {n_layers}: the jumps that it needs "
            "have no R2 above 0"
        )
    return _backtracked(best, max(ends, key=lambda state: best[state][0]), blocks)


def best_schedules(
    r2: Mapping[tuple[int, int], float], n_layers: int, budgets: Iterable[int]
) -> list[Schedule]:
    """`best_schedule` for each number of blocks; those that no jumps allow are left out."""
    schedules = []
    for blocks in budgets:
        with suppress(BadSettings):
            schedules.append(best_schedule(r2, n_layers, blocks))
    return schedules


_Best = dict[tuple[int, int, bool], tuple[float, tuple[int, int, bool] | None]]


def _improve(
    best: _Best, state: tuple[int, int, bool], value: float, previous: tuple[int, int, bool]
) -> None:
    if state not in best or value > best[state][0]:
        best[state] = (value, previous)


def _backtracked(best: _Best, state: tuple[int, int, bool], blocks: int) -> Schedule:
    """The segments that led to `state`, with single blocks joined into runs."""
    segments: list[Segment] = []
    while (previous := best[state][1]) is not None:
        kind: Literal["run", "jump"] = "jump" if state[2] else "run"
        if kind == "run" and segments and segments[-1].kind == "run":
            segments[-1] = Segment("run", previous[0], segments[-1].dst)
        else:
            segments.append(Segment(kind, previous[0], state[0]))
        state = previous
    return Schedule(f"best R2, {blocks} blocks", tuple(reversed(segments)))


def _schedule(name: str, ends: list[tuple[Literal["run", "jump"], int]]) -> Schedule:
    """A schedule given by where its segments end; empty ones are left out."""
    segments, reached = [], 0
    for kind, end in ends:
        if end > reached:
            segments.append(Segment(kind, reached, end))
            reached = end
    return Schedule(name, tuple(segments))


def _check_blocks(n_layers: int, blocks: int) -> None:
    if not 0 <= blocks <= n_layers:
        raise BadSettings(f"cannot run {blocks} blocks: this model has {n_layers}")
