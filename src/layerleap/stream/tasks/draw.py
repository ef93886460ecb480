"""Demonstrations and queries of a task, drawn by a seed.

In: an `EncodedTask` and a seed. Out: a `Draw`: disjoint demonstrations, queries, and other queries
to choose settings on; the order of demonstrations is the same in all conditions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerleap.errors import BadSettings, BadText
from layerleap.stream.tasks.prompts import EncodedTask, Piece

FEWEST_QUERIES = 2
SEARCH_SEED = "search"  # the same whatever the seed of a draw


@dataclass(frozen=True)
class Draw:
    """What one seed chose."""

    seed: int
    demonstrations: tuple[Piece, ...]
    shuffled: tuple[Piece, ...]  # the same, with the answers of others
    queries: tuple[Piece, ...]
    search: tuple[Piece, ...]  # other queries, for learning rates and the like


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
        demonstrations: how many. The first k of them are those of a draw with k demonstrations.
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
    held_back: list[Piece] = []
    if search:
        free = len(order) - demonstrations
        n_search = min(search, max(FEWEST_QUERIES, free * search // (queries + search)))
        held_back = random.Random(SEARCH_SEED).sample(order, n_search)
        numbers = {piece.number for piece in held_back}
        order = [piece for piece in order if piece.number not in numbers]
    random.Random(seed).shuffle(order)
    if encoded.task.kind == "classes":
        order = _balanced(order)
    shown, rest = order[:demonstrations], order[demonstrations:]
    random.Random(seed + 1).shuffle(rest)  # balancing put rare classes first
    return Draw(seed, tuple(shown), shuffled(shown, seed), tuple(rest[:queries]), tuple(held_back))


def _balanced(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, in turns of one per class, each turn in the order of the draw."""
    turns: dict[str, int] = {}
    keyed = []
    for place, piece in enumerate(pieces):
        turn = turns[piece.label] = turns.get(piece.label, -1) + 1
        keyed.append((turn, place, piece))
    return [piece for _, _, piece in sorted(keyed, key=lambda one: one[:2])]


def shuffled(pieces: Sequence[Piece], seed: int) -> tuple[Piece, ...]:
    """The pieces with their answers dealt out anew at random: each occurs as often as before."""
    answers = [(piece.answer, piece.label) for piece in pieces]
    own = [label for _, label in answers]
    random.Random(f"{seed} answers").shuffle(answers)
    if [label for _, label in answers] == own:  # of two pieces, half of the time
        answers = answers[1:] + answers[:1]
    return tuple(
        replace(piece, answer=answer, label=label)
        for piece, (answer, label) in zip(pieces, answers, strict=True)
    )
