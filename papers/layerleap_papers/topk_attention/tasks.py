"""Tasks for training small classifiers from scratch: sequences of symbols with their classes.

In: a recipe, or the bundled reviews. Out: a `Task`, to train on and to test on.

ListOps are nested lists of digits under MIN, MAX, MED and SM. The class is the value.

    [MAX 4 [SM 9 3 7] 2 ]     SM is the sum modulo 10, MED the median, rounded down

The task is that of Nangia and Bowman (2018), as used in the Long Range Arena; sequences here are
shorter, so that a small model learns something in minutes. The same settings give the same
sequences on every machine. Byte-level reviews are the arena's text task: is the verdict of a film
review good or bad, read letter by letter? Only the end of a review is kept.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.short_repr import ShortRepr
from layerleap.study import Settings, option
from layerleap.zoo import is_held_out

PAD, START = 0, 1  # symbols of every task; the others begin at 2
BYTES = 256
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


@dataclass(frozen=True, repr=False)
class Rows(ShortRepr):
    """Sequences padded on the right with `PAD`; each begins with `START`."""

    ids: Tensor  # (row, pos)
    labels: Tensor  # (row,)

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], labels: Sequence[int]) -> "Rows":
        """Rows of these sequences, which count their symbols from 0."""
        ids = [torch.tensor([START, *(2 + s for s in symbols)]) for symbols in sequences]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
        return cls(padded, torch.tensor(labels))

    @property
    def lengths(self) -> Tensor:
        """How many positions each sequence has: (row,)."""
        return (self.ids != PAD).sum(1)

    def inputs(self, rows: Tensor) -> dict[str, Tensor]:
        """What a model takes for some rows, without needless padding."""
        ids = self.ids[rows]
        ids = ids[:, : int((ids != PAD).sum(1).max())]
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@dataclass(frozen=True, repr=False)
class Task(ShortRepr):
    """One task. No held-out sequence is among the fitted ones."""

    name: str
    symbols: int  # padding and start included
    classes: int
    fitted: Rows
    held_out: Rows

    @property
    def longest(self) -> int:
        """How many positions the longest sequence has."""
        return max(self.fitted.ids.shape[1], self.held_out.ids.shape[1])

    @property
    def chance(self) -> float:
        """Held-out accuracy of always giving the class that is most frequent in training."""
        usual = self.fitted.labels.bincount().argmax()
        return float((self.held_out.labels == usual).double().mean())


@dataclass(frozen=True)
class ListOpsSettings(Settings):
    """Sizes of the task; plain values, which become part of every result."""

    n_fitted: int = option(12_000, "Expressions to train on.", least=1)
    n_held_out: int = option(1000, "Expressions to test on.", least=1)
    shortest: int = option(8, "Symbols of an expression, at least.", least=4)
    longest: int = option(64, "Symbols of an expression, at most.")
    depth: int = option(3, "Lists inside lists, at most.", least=1)
    arguments: int = option(5, "Arguments of one list, at most.", least=2)
    seed: int = option(0, "Decides which expressions are made.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest < self.shortest:
            raise BadSettings(
                f"longest is {self.longest} and shortest {self.shortest}; expected no less"
            )


def listops(settings: ListOpsSettings | None = None) -> Task:
    """The task; all expressions are different."""
    s = settings or ListOpsSettings()
    rng, known = random.Random(s.seed), set[tuple[int, ...]]()
    made: list[tuple[tuple[int, ...], int]] = []
    needed = s.n_fitted + s.n_held_out
    for _ in range(TRIES * needed):
        symbols, result = expression(rng, s.depth, s.arguments)
        if s.shortest <= len(symbols) <= s.longest and (ids := tuple(symbols)) not in known:
            known.add(ids)
            made.append((ids, result))
            if len(made) == needed:
                break
    else:
        raise BadSettings(
            f"only {len(made):,} of {needed:,} different expressions of {s.shortest} to "
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


def reviews_by_side(path: Path) -> dict[bool, list[dict[str, Any]]]:
    """Records of a .jsonl file of labelled reviews, shuffled: those to train on, and held out.

    Reviews are held out by the same rule as for all models that are trained on them.
    """
    with path.open(encoding="utf8") as lines:
        records = [json.loads(line) for line in lines]
    random.Random(0).shuffle(records)  # the file has one source and verdict after the other
    sides: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for record in records:
        sides[is_held_out(record["text"])].append(record)
    return sides


def byte_reviews(
    path: Path, n_fitted: int = 8000, n_held_out: int = 1000, longest: int = 128
) -> Task:
    """The task of byte-level reviews, with so many of them and so many bytes at their ends."""
    sides, rows, known = reviews_by_side(path), [], set[bytes]()
    for is_test, n in ((False, n_fitted), (True, n_held_out)):
        ends: dict[bytes, int] = {}  # different reviews may have the same end; each counts once
        for record in sides[is_test]:
            end = record["text"].encode("utf8", "replace")[-longest:]
            if end not in known and len(ends) < n:
                ends.setdefault(end, int(record["label"]))
        if not ends:
            raise BadText(f"{path} has no reviews to {'test' if is_test else 'train'} on")
        known |= ends.keys()
        rows.append(Rows.of([list(end) for end in ends], list(ends.values())))
    return Task("byte-reviews", 2 + BYTES, 2, *rows)
