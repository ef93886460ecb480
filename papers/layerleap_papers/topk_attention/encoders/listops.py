"""ListOps: nested lists of digits under MIN, MAX, MED and SM, made by a recipe.

In: how many, how long and how deep. Out: a `Task` whose class is the value of the expression.

    [MAX 4 [SM 9 3 7] 2 ]     SM is the sum modulo 10, MED the median, rounded down

The task is that of Nangia and Bowman (2018), as used in the Long Range Arena; sequences here are
shorter, so that a small model learns something in minutes. The same settings give the same
sequences on every machine.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from layerleap.errors import BadSettings
from layerleap_papers.topk_attention.encoders.task import Rows, Task

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(median(values)),
    "SM": lambda values: sum(values) % 10,
}
# Symbols: the ten digits, one for each operator with its bracket, and the closing bracket.
SYMBOLS = (*map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]")
CLOSE = len(SYMBOLS) - 1
NESTED = 0.35  # share of arguments that are lists themselves, while depth allows
TRIES = 400  # expressions drawn per wanted one, at most: short bounds leave few different ones


@dataclass(frozen=True)
class ListOpsSettings:
    """Sizes of the task; plain values, which become part of every result."""

    n_fitted: int = 12_000
    n_held_out: int = 1000
    shortest: int = 8  # symbols
    longest: int = 64
    depth: int = 3  # lists inside lists, at most
    arguments: int = 5  # of one list, at most
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"n_fitted": 1, "n_held_out": 1, "depth": 1, "arguments": 2, "shortest": 4}
        for name, lowest in least.items():
            if (value := getattr(self, name)) < lowest:
                raise BadSettings(f"{name} is {value}; expected {lowest} or more")
        if self.longest < self.shortest:
            raise BadSettings(
                f"longest is {self.longest} and shortest {self.shortest}; expected no less"
            )


def listops(settings: ListOpsSettings | None = None) -> Task:
    """The task; all expressions are different."""
    s = settings or ListOpsSettings()
    rng, known = random.Random(s.seed), set[tuple[int, ...]]()
    made: list[tuple[tuple[int, ...], int]] = []
    wanted = s.n_fitted + s.n_held_out
    for _ in range(TRIES * wanted):
        symbols, result = expression(rng, s.depth, s.arguments)
        if s.shortest <= len(symbols) <= s.longest and (one := tuple(symbols)) not in known:
            known.add(one)
            made.append((one, result))
            if len(made) == wanted:
                break
    else:
        raise BadSettings(
            f"only {len(made):,} of {wanted:,} different expressions of {s.shortest} to "
            f"{s.longest} symbols were found; allow longer or deeper ones, or ask for fewer"
        )
    sides = [Rows.of(*zip(*part, strict=True)) for part in (made[: s.n_fitted], made[s.n_fitted :])]
    return Task("listops", 2 + len(SYMBOLS), 10, *sides)


def expression(rng: random.Random, depth: int, arguments: int) -> tuple[list[int], int]:
    """The symbols of one random list, and its value."""
    number = rng.randrange(len(OPERATORS))
    symbols, values = [10 + number], []
    for _ in range(rng.randint(2, arguments)):
        if depth > 1 and rng.random() < NESTED:
            inner, result = expression(rng, depth - 1, arguments)
        else:
            result = rng.randrange(10)
            inner = [result]
        symbols += inner
        values.append(result)
    return [*symbols, CLOSE], list(OPERATORS.values())[number](values)


def written(symbols: list[int]) -> str:
    """The expression as text."""
    return " ".join(SYMBOLS[symbol] for symbol in symbols)
