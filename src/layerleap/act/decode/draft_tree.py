"""Which tokens to try next, as a tree sized by what tokens cost and how often they are right.

In: the text so far, sources of guesses, what a pass over n tokens costs.
Out: a tree whose first node is the token that is certain, the others guesses after it.

Each guess has a chance of being right, learned from the guesses of its kind so far; a node's chance
is the product along its path. The likeliest nodes are taken, as many as make tokens per second
largest: (1 + sum of their chances) / seconds of a pass over them.
"""

import heapq
import math
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate

from layerleap.act.decode.draft_table import DraftTable
from layerleap.act.decode.pass_cost import PassCost
from layerleap.act.decode.prompt_lookup import Lookup
from layerleap.models.cursor.tree import Tree

MOST = 32  # nodes at most, beyond which passes were not measured
WEIGHT = 4.0  # guesses that the chance assumed at first is worth
LEARN = 0.3  # of what a pass took otherwise than thought
DEEPEST = 10  # tokens that a lookup is followed for
LOOKED_UP = {2: 0.35, 3: 0.5, 4: 0.6}  # chance assumed at first, by tokens that matched
REMEMBERED_AT_MOST = 200_000  # such answers: some tens of megabytes
REMEMBERED = {1: 0.3, 2: 0.5}  # the same, of what the model said after such tokens before

Kind = tuple[str, int]  # a source, and how sure it is of the guess


@dataclass
class AcceptanceRates:
    """How often guesses of each kind were right, counted as they are tried."""

    right: dict[Kind, float] = field(default_factory=dict)
    tried: dict[Kind, int] = field(default_factory=dict)

    def of(self, kind: Kind, at_first: float) -> float:
        """The chance of a guess, drawn towards what was assumed at first."""
        tried = self.tried.get(kind, 0)
        return (self.right.get(kind, 0.0) + WEIGHT * at_first) / (tried + WEIGHT)

    def note(self, kind: Kind, was_right: bool) -> None:
        """One guess was tried, its parent being right."""
        self.right[kind] = self.right.get(kind, 0.0) + was_right
        self.tried[kind] = self.tried.get(kind, 0) + 1


@dataclass(frozen=True)
class Draft:
    """A tree, and for each node the kind of guess that it is; the first is none."""

    tree: Tree
    kinds: tuple[Kind | None, ...]
    chances: tuple[float, ...]


@dataclass(order=True)
class _Guess:
    order: float
    chance: float = field(compare=False)
    parent: int = field(compare=False)
    token: int = field(compare=False)
    kind: Kind = field(compare=False)
    rest: Sequence[int] = field(compare=False, default=())  # what the same lookup says follows
    matched: int = field(compare=False, default=0)


@dataclass
class SharedPass:
    """What else a pass holds: tokens of other texts, and how many of them are expected to stay."""

    nodes: int = 0
    expected: float = 0.0


class Drafter:
    """Draws trees for one text after another, and learns which guesses are right."""

    def __init__(
        self,
        cost: PassCost,
        table: DraftTable | None = None,
        *,
        lookup: bool = True,
        branches: bool = True,
        most: int = MOST,
        d_vocab: int | None = None,
    ) -> None:
        """Nothing learned yet.

        Args:
            cost: of passes.
            table: followers of tokens.
            lookup: also look for what followed the same tokens earlier in the text.
            branches: False if the model cannot look at several guesses for one place.
            most: nodes at most, the certain one included.
            d_vocab: tokens that the model can be given; some heads have more.
        """
        self._d_vocab = d_vocab or sys.maxsize
        self.cost, self.table, self.chances = cost, table, AcceptanceRates()
        self.branches, self.most, self._looks = branches, most, lookup
        self._seconds = [cost.of(n) for n in range(1, most + 1)]
        self._shared = list(self._seconds)  # of passes that texts share; learned from them
        self.lookup = Lookup()
        self._said: dict[tuple[int, ...], int] = {}  # after one token or two: the model's choice

    def begin(self, ids: Sequence[int]) -> None:
        """A new text, as far as it is known; what the model said in others is remembered."""
        self.lookup = Lookup()
        if self._looks:
            self.lookup.extend(list(ids))

    def note(self, token: int) -> None:
        """One more token of the text."""
        if self._looks:
            self.lookup.add(token)

    def twin(self) -> "Drafter":
        """For one of several texts at a time; what either learns, all know."""
        other = copy(self)
        other.lookup, other._seconds = Lookup(), self._shared
        return other

    def took(self, nodes: int, seconds: float) -> None:
        """A pass was timed, drafts and choices and all: what it and its like cost is corrected.

        Args:
            nodes: that the pass held.
            seconds: that it took.
        """
        n = min(nodes, len(self._seconds))
        # One slow moment must not decide it.
        wrong = min(2.0, max(0.5, seconds / self._seconds[n - 1]))
        for size in range(1, len(self._seconds) + 1):
            likeness = min(size, n) / max(size, n)
            self._seconds[size - 1] *= wrong ** (LEARN * likeness)

    def draw(self, token: int, room: int, beside: SharedPass | None = None) -> Draft:
        """A tree after the text so far.

        Args:
            token: the last one of the text, which is certain but has not been run.
            room: how many more tokens the text may get after it.
            beside: what the pass holds already.
        """
        beside = beside or SharedPass()
        seconds = self._seconds[beside.nodes :]
        ids, parents, chances = [token], [-1], [1.0]
        kinds: list[Kind | None] = [None]
        depth, has_child = [0], [False]
        waiting: list[_Guess] = []
        found, matched = self.lookup.find(min(DEEPEST, room)) if self._looks else ([], 0)
        if found:
            self._look(waiting, 0, 1.0, found, matched)
        before = self.lookup.ids[-2] if len(self.lookup.ids) > 1 else -1
        self._follow(waiting, 0, 1.0, token, before)
        taken: dict[tuple[int, int], int] = {}
        expected = beside.expected + 1.0  # tokens
        fastest = expected / seconds[0]  # tokens per second
        while waiting and len(ids) < len(seconds):
            if not _may_pay(seconds[len(ids) :], expected, waiting[0].chance, fastest):
                break
            guess = heapq.heappop(waiting)
            if (node := taken.get((guess.parent, guess.token))) is not None:
                if guess.rest:  # the same guess from elsewhere: only what follows is news
                    self._look(waiting, node, chances[node], guess.rest, guess.matched)
                continue
            if depth[guess.parent] + 1 > room or (has_child[guess.parent] and not self.branches):
                continue
            size = len(ids)
            taken[guess.parent, guess.token] = size
            has_child[guess.parent] = True
            ids.append(guess.token)
            parents.append(guess.parent)
            kinds.append(guess.kind)
            chances.append(guess.chance)
            depth.append(depth[guess.parent] + 1)
            has_child.append(False)
            expected += guess.chance
            fastest = max(fastest, expected / seconds[size])
            if guess.rest:
                self._look(waiting, size, guess.chance, guess.rest, guess.matched)
            self._follow(waiting, size, guess.chance, guess.token, ids[guess.parent])
        best = _worth(
            chances, beside.expected, seconds
        )  # likelier nodes came first, so any beginning is a tree
        return _in_rows(ids[:best], parents[:best], kinds[:best], chances[:best])

    def _look(
        self, waiting: list[_Guess], parent: int, chance: float, found: Sequence[int], matched: int
    ) -> None:
        kind = ("lookup", min(matched, 8))
        own = chance * self.chances.of(kind, LOOKED_UP.get(matched, 0.7))
        guess = _Guess(-own, own, parent, found[0], kind, found[1:], matched + 1)
        heapq.heappush(waiting, guess)

    def _follow(
        self, waiting: list[_Guess], parent: int, chance: float, token: int, before: int
    ) -> None:
        """What may come after a token: what the model said there before, and the table."""
        for run in ((before, token), (token,)):
            if (said := self._said.get(run)) is not None:
                self._push(waiting, parent, chance, said, ("said", len(run)), REMEMBERED[len(run)])
        if self.table is None:
            return
        if (
            token < self.table.size and not self.table.known[token]
        ):  # with those that may come next: they cost hardly more
            self.table.need([token, *(guess.token for guess in waiting[: self.most])])
        for follower, p in zip(*self.table.of(token), strict=True):
            self._push(waiting, parent, chance, follower, ("table", _level(p)), p)

    def _push(
        self,
        waiting: list[_Guess],
        parent: int,
        chance: float,
        token: int,
        kind: Kind,
        at_first: float,
    ) -> None:
        own = chance * self.chances.of(kind, at_first)
        heapq.heappush(waiting, _Guess(-own, own, parent, token, kind))

    def learn(
        self,
        drafted: Draft,
        path: Sequence[int],
        said: Sequence[int],
        new: Sequence[int],
    ) -> None:
        """Which guesses were right, and what the model would have said after all of them.

        Args:
            drafted: the tree that was tried.
            path: the nodes that were right, the certain one first.
            said: by node, the likeliest token after it. After a wrong guess it is an answer to
                another text, but often the same words come up again, and then it is at hand.
            new: the tokens that the text was given by it.
        """
        if self._looks:
            self._remember(drafted.tree, said)
        for node in path:
            right = next((n for n in path if drafted.tree.parents[n] == node), None)
            for child, parent in enumerate(drafted.tree.parents):
                kind = drafted.kinds[child]
                if parent == node and kind is not None:
                    self.chances.note(kind, child == right)
        for token in new:
            self.note(token)

    def _remember(self, tree: Tree, said: Sequence[int]) -> None:
        if len(self._said) > REMEMBERED_AT_MOST:
            self._said.clear()
        before = self.lookup.ids[-2] if len(self.lookup.ids) > 1 else -1
        for token, parent, answer in zip(tree.ids, tree.parents, said, strict=True):
            if answer >= self._d_vocab:
                continue
            self._said[token,] = answer
            self._said[tree.ids[parent] if parent >= 0 else before, token] = answer


def _may_pay(seconds: Sequence[float], expected: float, likeliest: float, fastest: float) -> bool:
    """False if no larger tree can be faster, even if all its nodes were that likely.

    Args:
        seconds: of passes with one node more, two more, ...
        expected: tokens that the pass gives so far.
        likeliest: the chance of the next node.
        fastest: tokens per second of the best size so far.
    """
    return any(
        expected + more * likeliest > fastest * took for more, took in enumerate(seconds, start=1)
    )


def _worth(chances: Sequence[float], others: float, seconds: Sequence[float]) -> int:
    """How many nodes make tokens per second largest."""
    rates = [(others + own) / took for own, took in zip(accumulate(chances), seconds, strict=False)]
    return rates.index(max(rates)) + 1


def _in_rows(
    ids: Sequence[int],
    parents: Sequence[int],
    kinds: Sequence[Kind | None],
    chances: Sequence[float],
) -> Draft:
    """Each path in one piece, the likeliest first: if that is right, the cache is in order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order, waiting = [], [0]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed(children.get(order[-1], ()))
    place = {node: new for new, node in enumerate(order)} | {-1: -1}
    tree = Tree(tuple(ids[n] for n in order), tuple(place[parents[n]] for n in order))
    return Draft(tree, tuple(kinds[n] for n in order), tuple(chances[n] for n in order))


def _level(p: float) -> int:
    """Probabilities by halvings: 0 for above one half, 1 for above a quarter, ..."""
    return min(9, int(-math.log2(max(p, 1e-9))))
