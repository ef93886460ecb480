"""Schedules of real blocks and jumps."""

import itertools
import math
import random

import pytest

from layerleap.act.edits.schedule import (
    Schedule,
    Segment,
    best_schedule,
    round_robin,
    round_robins,
    single_jump,
)
from layerleap.errors import BadSettings


def product(schedule, r2):
    return math.prod(r2[jump] for jump in schedule.jumps)


def every_schedule(n_layers):
    """All ways from layer 0 to the last in which no jump follows another."""

    def onward(layer, jumped):
        if layer == n_layers:
            yield ()
            return
        for rest in onward(layer + 1, False):
            yield (Segment("run", layer, layer + 1), *rest)
        if not jumped:
            for dst in range(layer + 1, n_layers + 1):
                for rest in onward(dst, True):
                    yield (Segment("jump", layer, dst), *rest)

    return [Schedule("any", way) for way in onward(0, False)]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_schedule_is_the_best_of_all_there_are(seed):
    n_layers, draw = 6, random.Random(seed)
    r2 = {pair: draw.uniform(-0.2, 1) for pair in itertools.combinations(range(n_layers + 1), 2)}
    ways = every_schedule(n_layers)
    for blocks in range(n_layers + 1):
        fair = [
            way for way in ways if way.blocks == blocks and all(r2[jump] > 0 for jump in way.jumps)
        ]
        if not fair:
            with pytest.raises(BadSettings, match="no R2 above 0"):
                best_schedule(r2, n_layers, blocks)
            continue
        found = best_schedule(r2, n_layers, blocks)
        assert (found.blocks, found.n_layers) == (blocks, n_layers)
        assert product(found, r2) == pytest.approx(max(product(way, r2) for way in fair))


def test_round_robin_runs_and_jumps_in_turn():
    found = round_robin(6, 1, 2)
    assert str(found) == "0-1~3-4~6"
    assert found.blocks == 2
    assert found.jumps == ((1, 3), (4, 6))


def test_every_round_robin_divides_the_layers_into_two_turns_or_more():
    found = round_robins(6)
    assert [str(s) for s in found] == ["0-1~2-3~4-5~6", "0-1~3-4~6", "0-2~3-5~6"]
    assert round_robins(7) == []


def test_a_single_jump_of_no_block_and_of_all_blocks():
    assert str(single_jump(4, 0)) == "0~4"
    assert str(single_jump(4, 4)) == "0-4"
    assert str(single_jump(4, 3)) == "0-3~4"


def test_turns_that_do_not_divide_the_layers_are_refused():
    with pytest.raises(BadSettings, match="their sum to divide the number of layers"):
        round_robin(7, 1, 2)
    with pytest.raises(BadSettings, match="expected both to be 1 or more"):
        round_robin(6, 0, 2)


def test_more_blocks_than_there_are_cannot_be_run():
    for make in (single_jump, lambda n, blocks: best_schedule({}, n, blocks)):
        with pytest.raises(BadSettings, match="this model has 4"):
            make(4, 5)


def test_segments_with_a_gap_are_refused():
    with pytest.raises(BadSettings, match="must start where the last one ended"):
        Schedule("gap", (Segment("run", 0, 2), Segment("jump", 3, 4)))
