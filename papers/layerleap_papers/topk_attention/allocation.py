"""A budget shared out over blocks: which block to restrict next, and how far one can go.

In: what each block costs alone at every level, and how much each level saves. Out: steps in the
order in which they are worth taking, and the number of steps that a limit allows.

Costs are measured at few levels; between those they are guessed, which decides only the order of
steps. What steps cost together is measured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

Plan = dict[int, int]  # by block, the number of its level; 0 is the whole block


def finer(levels: Sequence[float], parts: int) -> list[float]:
    """The levels, falling, with others between them at equal ratios: `parts` for one."""
    fine = [levels[0]]
    for high, low in pairwise(levels):
        fine += [high * (low / high) ** (part / parts) for part in range(1, parts)] + [low]
    return fine


def guessed(
    levels: Sequence[float], costs: Sequence[float], others: Sequence[float]
) -> list[float]:
    """Costs at other levels, between the measured ones.

    They grow as a power of the level between two measured ones, and with the square of the distance
    from level 0, which costs nothing.

    Levels fall, others within the range of those measured; the first cost is 0.
    """
    return [_guess(levels, costs, level) for level in others]


def _guess(levels: Sequence[float], costs: Sequence[float], level: float) -> float:
    for (high, low), (before, after) in zip(pairwise(levels), pairwise(costs), strict=True):
        if high >= level >= low:
            way = math.log(high / level) / math.log(high / low)
            if before > 0 and after > 0:
                return before * (after / before) ** way
            return before + (after - before) * way**2
    raise ValueError(f"level {level} is outside {levels[0]} to {levels[-1]}")


def steps(costs: Mapping[int, Sequence[float]], kept: Sequence[float]) -> list[Plan]:
    """Plans from the whole model to the last level everywhere, each one step from the one before.

    Each step moves the block whose cost grows least for what it saves, possibly by several levels
    at once.

    Args:
        costs: by block, the cost of each level alone; that of level 0 is 0. A level that costs less
            than a milder one counts as costing the same: such differences are noise.
        kept: the part that each level keeps, falling from 1.
    """
    risen = {block: list(accumulate(by_level, max)) for block, by_level in costs.items()}
    plan: Plan = dict.fromkeys(costs, 0)
    plans = [dict(plan)]
    last = len(kept) - 1
    while any(level < last for level in plan.values()):
        rates = [
            ((risen[block][to] - risen[block][at]) / (kept[at] - kept[to]), block, to)
            for block, at in plan.items()
            for to in range(at + 1, last + 1)
        ]
        # Of equal rates, the longer way: several free levels are one step.
        _, block, to = min(rates, key=lambda rate: (rate[0], -rate[2], rate[1]))
        plan[block] = to
        plans.append(dict(plan))
    return plans


def furthest(n: int, cost: Callable[[int], float], limit: float) -> int:
    """The largest number of steps below n whose cost is within the limit, found by bisection.

    Costs are taken to rise with the steps; step 0 costs nothing. At most log2(n) + 1 are computed.
    """
    low, high = 0, n  # `low` is within the limit, `high` is beyond it
    while high - low > 1:
        middle = (low + high) // 2
        if cost(middle) <= limit:
            low = middle
        else:
            high = middle
    return low
