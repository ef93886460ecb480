"""Demonstrations and queries of a task, drawn by a seed.

In: an `EncodedTask` and a seed. Out: a `Draw`: disjoint demonstrations, queries, and other queries
to choose settings on; the order of demonstrations is the same in all conditions.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerleap.errors import BadSettings, BadText
from layerleap.stream.tasks.prompts import EncodedTask, Piece

FEWEST_QUERIES = 2
TRIES = 64  # permutations from which one with as many right answers as by chance is taken
SEARCH_SEED = "search"  # the same whatever the seed of a draw


@dataclass(frozen=True)
class Draw:
    """What one seed chose."""

    seed: int
    kind: str  # of the task
    demonstrations: tuple[Piece, ...]
    queries: tuple[Piece, ...]
    search: tuple[Piece, ...]  # other queries, for learning rates and the like
    spare: tuple[Piece, ...]  # examples without a role

    def shuffled(self, n: int | None = None) -> tuple[Piece, ...]:
        """The first n demonstrations (all when None), with the answers of others among them."""
        return shuffled(self.demonstrations[:n], self.seed, self.kind)

    def extended(self, queries: int, demonstrations: int) -> "Draw":
        """The same draw with more demonstrations, and with the first queries alone.

        Further demonstrations are examples without a role, and queries beyond the first ones;
        there may be fewer of them than asked for.
        """
        others = [*self.queries[queries:], *self.spare]
        more = _balanced(others) if self.kind == "classes" else others
        shown = (*self.demonstrations, *more)[: max(demonstrations, len(self.demonstrations))]
        return replace(self, demonstrations=shown, queries=self.queries[:queries], spare=())


def draw(
    encoded: EncodedTask,
    seed: int = 0,
    *,
    demonstrations: int = 16,
    queries: int = 100,
    search: int = 0,
) -> Draw:
    """Demonstrations, queries for measurements, and queries for choosing settings.

    No example has two roles. Those for choosing settings are the same for all seeds, so that no
    seed measures what another seed's settings were chosen on. Of a task with classes,
    demonstrations are balanced as far as possible. Fewer queries than asked for are drawn if the
    task has no more.

    Args:
        encoded: the task.
        seed: decides which examples, and their order.
        demonstrations: how many. Without `search`, the first k of them are those of a draw with k.
        queries: how many, at most.
        search: how many other queries; those of small tasks are fewer in proportion.
    """
    for name, value in (("queries", queries), ("search", search)):
        if value < 0:
            raise BadSettings(f"{name} is {value}; expected 0 or more")
    order = list(encoded.pieces)
    least = demonstrations + FEWEST_QUERIES * (1 + bool(search))
    if len(order) < least:
        raise BadText(
            f"task {encoded.task.name!r} has {len(order)} examples whose answers fit "
            f"{encoded.model}; {demonstrations} demonstrations and queries need {least}: ask for "
            "fewer demonstrations, or give more examples"
        )
    search_queries: list[Piece] = []
    if search:
        free = len(order) - demonstrations
        n_search = min(search, max(FEWEST_QUERIES, free * search // (queries + search)))
        search_queries = random.Random(SEARCH_SEED).sample(order, n_search)
        numbers = {piece.number for piece in search_queries}
        order = [piece for piece in order if piece.number not in numbers]
    random.Random(seed).shuffle(order)
    if encoded.task.kind == "classes":
        order = _balanced(order)
    shown, rest = order[:demonstrations], order[demonstrations:]
    random.Random(seed + 1).shuffle(rest)  # balancing put rare classes first
    return Draw(
        seed,
        encoded.task.kind,
        tuple(shown),
        tuple(rest[:queries]),
        tuple(search_queries),
        tuple(rest[queries:]),
    )


def _balanced(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, in turns of one per class, each turn in the order of the draw."""
    turns: dict[str, int] = {}
    keyed = []
    for place, piece in enumerate(pieces):
        turn = turns[piece.label] = turns.get(piece.label, -1) + 1
        keyed.append((turn, place, piece))
    return [piece for _, _, piece in sorted(keyed, key=lambda entry: entry[:2])]


def shuffled(pieces: Sequence[Piece], seed: int, kind: str) -> tuple[Piece, ...]:
    """The pieces with their answers shuffled: each occurs as often as before.

    Of a mapping no piece keeps its answer, if that is possible at all. Of classes as many keep it
    as by chance, which is about one of as many as there are classes, and never all if that can be
    helped.
    """
    rng = random.Random(f"{seed} {len(pieces)} answers")
    order = _deranged(pieces, rng) if kind == "mapping" else _by_chance(pieces, rng)
    return tuple(
        replace(piece, answer=pieces[other].answer, label=pieces[other].label)
        for piece, other in zip(pieces, order, strict=True)
    )


def still_right(pieces: Sequence[Piece], shuffled: Sequence[Piece]) -> float:
    """The share of pieces whose answer is the right one after shuffling."""
    same = [a.label == b.label for a, b in zip(pieces, shuffled, strict=True)]
    return sum(same) / max(1, len(same))


def _deranged(pieces: Sequence[Piece], rng: random.Random) -> list[int]:
    """For each piece another one with a different answer, as far as possible.

    Pieces in a row, those with the same answer together: one that is as many places further on as
    the commonest answer occurs has another answer, unless that answer is more than half of all.
    """
    by_label: dict[str, list[int]] = {}
    for place, piece in enumerate(pieces):
        by_label.setdefault(piece.label, []).append(place)
    groups = list(by_label.values())
    rng.shuffle(groups)
    for group in groups:
        rng.shuffle(group)
    row = [place for group in groups for place in group]
    step = max(map(len, groups), default=0)
    order = [0] * len(row)
    for n, place in enumerate(row):
        order[place] = row[(n + step) % len(row)]
    return order


def _by_chance(pieces: Sequence[Piece], rng: random.Random) -> list[int]:
    """A permutation after which as many answers are right as on average over all permutations."""
    labels = [piece.label for piece in pieces]
    expected = sum(labels.count(label) for label in labels) / max(1, len(labels))
    best = list(range(len(labels)))
    least = (math.inf, 0)
    for _ in range(TRIES):
        order = rng.sample(range(len(labels)), len(labels))
        right = sum(labels[other] == label for other, label in zip(order, labels, strict=True))
        if (distance := (abs(right - expected), right)) < least:
            best, least = order, distance
    return best
