"""Draft trees: which tokens to try next, given what they cost and how often they are accepted.

In: the text so far, sources of drafts, the cost of a pass over n tokens.
Out: a tree whose root is the last token of the text and whose other nodes are draft tokens.

Each draft has a chance of acceptance, learned from earlier drafts of its kind; a node's chance is
the product along its path. The most likely nodes are taken, as many as maximise tokens per second:
(1 + sum of their chances) / seconds of a pass over them.
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

MOST = 32  # maximum number of nodes; larger passes are not measured
WEIGHT = 4.0  # weight of the prior chance, in drafts
LEARN = 0.3  # learning rate of pass times
DEEPEST = 10  # maximum length of a lookup draft
LOOKUP_PRIOR = {2: 0.35, 3: 0.5, 4: 0.6}  # prior chance by number of matched tokens
ANSWERS_AT_MOST = 200_000  # remembered answers: some tens of megabytes
ANSWER_PRIOR = {1: 0.3, 2: 0.5}  # prior chance of the model's earlier answer, by context length

Kind = tuple[str, int]  # a source, and a level of confidence


@dataclass
class AcceptanceRates:
    """How often drafts of each kind were accepted so far."""

    accepted: dict[Kind, float] = field(default_factory=dict)
    drafts: dict[Kind, int] = field(default_factory=dict)

    def of(self, kind: Kind, prior: float) -> float:
        """The estimated chance of a draft, shrunk towards the prior."""
        drafts = self.drafts.get(kind, 0)
        return (self.accepted.get(kind, 0.0) + WEIGHT * prior) / (drafts + WEIGHT)

    def record(self, kind: Kind, was_accepted: bool) -> None:
        """Record a draft whose parent was accepted."""
        self.accepted[kind] = self.accepted.get(kind, 0.0) + was_accepted
        self.drafts[kind] = self.drafts.get(kind, 0) + 1


@dataclass(frozen=True)
class Draft:
    """A tree, with the kind (None for the root) and the chance of each node."""

    tree: Tree
    kinds: tuple[Kind | None, ...]
    chances: tuple[float, ...]


@dataclass(order=True)
class _Candidate:
    order: float
    chance: float = field(compare=False)
    parent: int = field(compare=False)
    token: int = field(compare=False)
    kind: Kind = field(compare=False)
    rest: Sequence[int] = field(compare=False, default=())  # the rest of the same lookup
    matched: int = field(compare=False, default=0)


@dataclass
class SharedPass:
    """What else a pass holds: nodes of other texts, and the tokens expected from them."""

    nodes: int = 0
    expected: float = 0.0


class Drafter:
    """Draws draft trees for one text after another and learns which drafts are accepted."""

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
        """Start with nothing learned.

        Args:
            cost: cost of passes.
            table: followers of tokens.
            lookup: also draft what followed the same tokens earlier in the text.
            branches: False if the model cannot run several drafts for one position.
            most: maximum number of nodes, including the root.
            d_vocab: number of tokens in the embedding; some heads have more.
        """
        self._d_vocab = d_vocab or sys.maxsize
        self.cost, self.table, self.chances = cost, table, AcceptanceRates()
        self.branches, self.most, self._uses_lookup = branches, most, lookup
        self._seconds = [cost.of(n) for n in range(1, most + 1)]
        self._shared_seconds = list(self._seconds)  # of passes shared by texts, learned from them
        self.lookup = Lookup()
        self._answers: dict[tuple[int, ...], int] = {}  # the model's choice after 1 or 2 tokens

    def begin(self, ids: Sequence[int]) -> None:
        """Start a new text; the model's answers in earlier texts are kept."""
        self.lookup = Lookup()
        if self._uses_lookup:
            self.lookup.extend(list(ids))

    def add(self, token: int) -> None:
        """Append a token to the text."""
        if self._uses_lookup:
            self.lookup.add(token)

    def twin(self) -> "Drafter":
        """A drafter for one text of a batch; all twins share what they learn."""
        other = copy(self)
        other.lookup, other._seconds = Lookup(), self._shared_seconds
        return other

    def record_time(self, nodes: int, seconds: float) -> None:
        """Correct the cost of passes of about this size, including drafting and choosing.

        Args:
            nodes: number of nodes in the pass.
            seconds: how long it took.
        """
        n = min(nodes, len(self._seconds))
        # The correction is clipped, so that one slow moment does not decide.
        ratio = min(2.0, max(0.5, seconds / self._seconds[n - 1]))
        for size in range(1, len(self._seconds) + 1):
            similarity = min(size, n) / max(size, n)
            self._seconds[size - 1] *= ratio ** (LEARN * similarity)

    def draw(self, token: int, room: int, shared: SharedPass | None = None) -> Draft:
        """A draft tree after the text so far.

        Args:
            token: the last token of the text, which has not been run.
            room: how many more tokens may follow it.
            shared: what the pass already holds.
        """
        shared = shared or SharedPass()
        seconds = self._seconds[shared.nodes :]
        ids, parents, chances = [token], [-1], [1.0]
        kinds: list[Kind | None] = [None]
        depth, has_child = [0], [False]
        waiting: list[_Candidate] = []
        match = self.lookup.find(min(DEEPEST, room)) if self._uses_lookup else ([], 0)
        if match[0]:
            self._push_lookup(waiting, 0, 1.0, *match)
        before = self.lookup.ids[-2] if len(self.lookup.ids) > 1 else -1
        self._push_followers(waiting, 0, 1.0, token, before)
        taken: dict[tuple[int, int], int] = {}
        expected = shared.expected + 1.0  # tokens
        fastest = expected / seconds[0]  # tokens per second
        while waiting and len(ids) < len(seconds):
            if not _may_pay(seconds[len(ids) :], expected, waiting[0].chance, fastest):
                break
            best = heapq.heappop(waiting)
            if (node := taken.get((best.parent, best.token))) is not None:
                if best.rest:  # the same draft from another source: only its rest is new
                    self._push_lookup(waiting, node, chances[node], best.rest, best.matched)
                continue
            if depth[best.parent] + 1 > room or (has_child[best.parent] and not self.branches):
                continue
            size = len(ids)
            taken[best.parent, best.token] = size
            has_child[best.parent] = True
            ids.append(best.token)
            parents.append(best.parent)
            kinds.append(best.kind)
            chances.append(best.chance)
            depth.append(depth[best.parent] + 1)
            has_child.append(False)
            expected += best.chance
            fastest = max(fastest, expected / seconds[size])
            if best.rest:
                self._push_lookup(waiting, size, best.chance, best.rest, best.matched)
            self._push_followers(waiting, size, best.chance, best.token, ids[best.parent])
        # More likely nodes came first, so any prefix is a tree.
        size = _best_size(chances, shared.expected, seconds)
        return _depth_first(ids[:size], parents[:size], kinds[:size], chances[:size])

    def _push_lookup(
        self,
        waiting: list[_Candidate],
        parent: int,
        chance: float,
        tokens: Sequence[int],
        matched: int,
    ) -> None:
        kind = ("lookup", min(matched, 8))
        own = chance * self.chances.of(kind, LOOKUP_PRIOR.get(matched, 0.7))
        candidate = _Candidate(-own, own, parent, tokens[0], kind, tokens[1:], matched + 1)
        heapq.heappush(waiting, candidate)

    def _push_followers(
        self, waiting: list[_Candidate], parent: int, chance: float, token: int, before: int
    ) -> None:
        """Push what may follow a token: the model's earlier answers there, and the table."""
        for run in ((before, token), (token,)):
            if (answer := self._answers.get(run)) is not None:
                kind, prior = ("answer", len(run)), ANSWER_PRIOR[len(run)]
                self._push(waiting, parent, chance, answer, kind, prior)
        if self.table is None:
            return
        if token < self.table.size and not self.table.known[token]:
            # Together with tokens that may come next: these cost hardly more.
            self.table.need([token, *(other.token for other in waiting[: self.most])])
        for follower, p in zip(*self.table.of(token), strict=True):
            self._push(waiting, parent, chance, follower, ("table", _level(p)), p)

    def _push(
        self,
        waiting: list[_Candidate],
        parent: int,
        chance: float,
        token: int,
        kind: Kind,
        prior: float,
    ) -> None:
        own = chance * self.chances.of(kind, prior)
        heapq.heappush(waiting, _Candidate(-own, own, parent, token, kind))

    def learn(
        self,
        draft: Draft,
        path: Sequence[int],
        answers: Sequence[int],
        new: Sequence[int],
    ) -> None:
        """Learn which drafts were accepted, and the model's answer after each of them.

        Args:
            draft: the tree that was verified.
            path: the accepted nodes, the root first.
            answers: by node, the most likely token after it. After a rejected draft it answers
                another text, but the same words often come up again.
            new: the tokens that were added to the text.
        """
        if self._uses_lookup:
            self._remember(draft.tree, answers)
        for node in path:
            accepted = next((n for n in path if draft.tree.parents[n] == node), None)
            for child, parent in enumerate(draft.tree.parents):
                kind = draft.kinds[child]
                if parent == node and kind is not None:
                    self.chances.record(kind, child == accepted)
        for token in new:
            self.add(token)

    def _remember(self, tree: Tree, answers: Sequence[int]) -> None:
        if len(self._answers) > ANSWERS_AT_MOST:
            self._answers.clear()
        before = self.lookup.ids[-2] if len(self.lookup.ids) > 1 else -1
        for token, parent, answer in zip(tree.ids, tree.parents, answers, strict=True):
            if answer >= self._d_vocab:
                continue
            self._answers[token,] = answer
            self._answers[tree.ids[parent] if parent >= 0 else before, token] = answer


def _may_pay(seconds: Sequence[float], expected: float, likeliest: float, fastest: float) -> bool:
    """False if no larger tree can be faster, even if all its nodes were this likely.

    Args:
        seconds: of passes with one node more, two more, ...
        expected: expected tokens of the pass so far.
        likeliest: the chance of the next node.
        fastest: tokens per second of the best size so far.
    """
    return any(
        expected + more * likeliest > fastest * time for more, time in enumerate(seconds, start=1)
    )


def _best_size(chances: Sequence[float], others: float, seconds: Sequence[float]) -> int:
    """The number of nodes that maximises tokens per second."""
    rates = [(others + own) / time for own, time in zip(accumulate(chances), seconds, strict=False)]
    return rates.index(max(rates)) + 1


def _depth_first(
    ids: Sequence[int],
    parents: Sequence[int],
    kinds: Sequence[Kind | None],
    chances: Sequence[float],
) -> Draft:
    """Nodes depth first, most likely first: if that path is accepted, the cache is in order."""
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
    """Probabilities in powers of two: 0 above one half, 1 above a quarter, ..."""
    return min(9, int(-math.log2(max(p, 1e-9))))
