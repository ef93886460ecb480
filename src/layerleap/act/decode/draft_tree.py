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
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate

from layerleap.act.decode.draft_table import DraftTable
from layerleap.act.decode.pass_cost import PassCost
from layerleap.models.cursor.tree import Tree

MOST = 32  # maximum number of nodes; larger passes are not measured
WEIGHT = 4.0  # weight of the prior chance, in drafts
LEARN = 0.3  # learning rate of pass times
DEEPEST = 10  # maximum length of a lookup draft
LOOKUP_PRIOR = {2: 0.35, 3: 0.5, 4: 0.6}  # prior chance by number of matched tokens
ANSWERS_AT_MOST = 200_000  # remembered answers: some tens of megabytes
ANSWER_PRIOR = {1: 0.3, 2: 0.5}  # prior chance of the model's earlier answer, by context length
WORTH_A_ROW = 0.3  # chance of a node from which on its row of the table is computed
MORE_ROWS = 7  # rows that are computed along with one that is needed
LONGEST = 4  # longest run of tokens to look up; longer matches add little
SHORTEST = 2  # a single token is what the draft table is for

Kind = tuple[str, int]  # a source, and a level of confidence


class Lookup:
    """Prompt lookup: what followed the last few tokens when they occurred earlier in the text."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # from a run to the position after its end

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; each follows the runs that end before it."""
        for token in tokens:
            end = len(self.ids)
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(self.ids[end - size : end])] = end
            self.ids.append(token)

    def find(self, most: int) -> tuple[list[int], int]:
        """Up to `most` tokens that followed the longest matching run, and its size (0: none)."""
        for size in range(min(LONGEST, len(self.ids)), SHORTEST - 1, -1):
            place = self._after.get(tuple(self.ids[-size:]))
            if place is not None:
                return self.ids[place : place + most], size
        return [], 0


@dataclass
class AcceptanceRates:
    """How often drafts of each kind were accepted so far."""

    accepted: Counter[Kind] = field(default_factory=Counter)
    drafts: Counter[Kind] = field(default_factory=Counter)

    def of(self, kind: Kind, prior: float) -> float:
        """The estimated chance of a draft, shrunk towards the prior."""
        return (self.accepted[kind] + WEIGHT * prior) / (self.drafts[kind] + WEIGHT)

    def record(self, kind: Kind, was_accepted: bool) -> None:
        """Record a draft whose parent was accepted."""
        self.accepted[kind] += was_accepted
        self.drafts[kind] += 1


@dataclass(frozen=True)
class Draft:
    """A tree, with the kind (None for the root) and the chance of each node."""

    tree: Tree
    kinds: tuple[Kind | None, ...]
    chances: tuple[float, ...]


@dataclass(order=True)
class _Candidate:
    order: float  # minus its chance: the most likely comes first
    parent: int = field(compare=False)
    depth: int = field(compare=False)
    token: int = field(compare=False)
    kind: Kind | None = field(compare=False, default=None)
    rest: Sequence[int] = field(compare=False, default=())  # the rest of the same lookup
    matched: int = field(compare=False, default=0)

    @property
    def chance(self) -> float:
        return -self.order


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
            lookup: also draft what followed the same tokens earlier in the text.
            branches: False if the model cannot run several drafts for one position.
            most: maximum number of nodes, including the root.
            d_vocab: number of tokens in the embedding; some heads have more.
        """
        self._d_vocab = d_vocab or sys.maxsize
        self.table, self.chances = table, AcceptanceRates()
        self.branches, self._uses_lookup = branches, lookup
        self.use(cost, most)
        self.lookup = Lookup()
        self._answers: dict[tuple[int, ...], int] = {}  # the model's choice after 1 or 2 tokens

    def use(self, cost: PassCost, most: int) -> None:
        """From now on, passes over up to `most` nodes have this cost; the rest is kept."""
        self.cost, self.most = cost, most
        self._seconds = [cost.of(n) for n in range(1, most + 1)]
        self._shared_seconds = list(self._seconds)  # of passes shared by texts, learned from them

    def begin(self, ids: Sequence[int]) -> None:
        """Start a new text; the model's answers in earlier texts are kept."""
        self.lookup = Lookup()
        if self._uses_lookup:
            self.lookup.extend(ids)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        if self._uses_lookup:
            self.lookup.extend([token])

    def for_batch(self) -> "Drafter":
        """A drafter for one text of a batch; all of them share what they learn."""
        other = copy(self)
        other.lookup, other._seconds = Lookup(), self._shared_seconds
        return other

    def record_time(self, nodes: int, seconds: float) -> None:
        """Correct the cost of passes of about this size, including drafting and choosing."""
        n = min(nodes, len(self._seconds))
        # The correction is clipped, so that one slow moment does not decide.
        ratio = min(2.0, max(0.5, seconds / self._seconds[n - 1]))
        for size in range(1, len(self._seconds) + 1):
            similarity = min(size, n) / max(size, n)
            self._seconds[size - 1] *= ratio ** (LEARN * similarity)

    def draw(self, token: int, room: int, shared: SharedPass | None = None) -> Draft:
        """A draft tree after `token`, the last one of the text, which has not been run.

        At most `room` tokens may follow it; `shared` is what the pass already holds.
        """
        shared = shared or SharedPass()
        seconds = self._seconds[shared.nodes :]
        nodes = [_Candidate(-1.0, -1, 0, token)]
        waiting: list[_Candidate] = []
        match = self.lookup.find(min(DEEPEST, room)) if self._uses_lookup else ([], 0)
        if match[0]:
            self._push_lookup(waiting, nodes, 0, *match)
        self._push_followers(waiting, nodes, 0)
        taken: dict[tuple[int, int], int] = {}  # parent and token to node
        expected = shared.expected + 1.0  # tokens
        fastest = expected / seconds[0]  # tokens per second
        while waiting and len(nodes) < len(seconds):
            # Stop if no larger tree is faster, even with nodes as likely as the next one.
            likeliest, larger = waiting[0].chance, enumerate(seconds[len(nodes) :], 1)
            if not any(expected + more * likeliest > fastest * time for more, time in larger):
                break
            best = heapq.heappop(waiting)
            if (node := taken.get((best.parent, best.token))) is not None:
                if best.rest:  # the same draft from another source: only its rest is new
                    self._push_lookup(waiting, nodes, node, best.rest, best.matched)
                continue
            is_second = not self.branches and any(n.parent == best.parent for n in nodes)
            if best.depth > room or is_second:
                continue
            node = taken[best.parent, best.token] = len(nodes)
            nodes.append(best)
            expected += best.chance
            fastest = max(fastest, expected / seconds[node])
            if best.rest:
                self._push_lookup(waiting, nodes, node, best.rest, best.matched)
            self._push_followers(waiting, nodes, node)
        sums = accumulate(node.chance for node in nodes)
        rates = [(shared.expected + n) / time for n, time in zip(sums, seconds, strict=False)]
        # More likely nodes came first, so any prefix is a tree.
        return _depth_first(nodes[: rates.index(max(rates)) + 1])

    def _push_lookup(
        self,
        waiting: list[_Candidate],
        nodes: Sequence[_Candidate],
        parent: int,
        tokens: Sequence[int],
        matched: int,
    ) -> None:
        prior = LOOKUP_PRIOR.get(matched, 0.7)
        first = self._candidate(nodes, parent, tokens[0], ("lookup", min(matched, 8)), prior)
        heapq.heappush(waiting, replace(first, rest=tokens[1:], matched=matched + 1))

    def _push_followers(
        self, waiting: list[_Candidate], nodes: Sequence[_Candidate], parent: int
    ) -> None:
        """Push what may follow a node: the model's earlier answers there, and the table."""
        token, above = nodes[parent].token, nodes[parent].parent
        before = nodes[above].token if above >= 0 else self._token_before
        for run in ((before, token), (token,)):
            if (answer := self._answers.get(run)) is not None:
                kind, prior = ("answer", len(run)), ANSWER_PRIOR[len(run)]
                heapq.heappush(waiting, self._candidate(nodes, parent, answer, kind, prior))
        if self.table is None:
            return
        if token < self.table.size and not self.table.known[token]:
            if nodes[parent].chance < WORTH_A_ROW:
                return
            # Together with the likeliest of those that may come next: these cost hardly more.
            self.table.need([token, *(other.token for other in waiting[:MORE_ROWS])])
        for follower, p in zip(*self.table.of(token), strict=True):
            level = min(9, int(-math.log2(max(p, 1e-9))))  # 0 above 1/2, 1 above 1/4, ...
            kind = ("table", level)
            heapq.heappush(waiting, self._candidate(nodes, parent, follower, kind, p))

    def _candidate(
        self, nodes: Sequence[_Candidate], parent: int, token: int, kind: Kind, prior: float
    ) -> _Candidate:
        above = nodes[parent]
        chance = above.chance * self.chances.of(kind, prior)
        return _Candidate(-chance, parent, above.depth + 1, token, kind)

    @property
    def _token_before(self) -> int:
        """The token before the last one of the text, or -1."""
        return self.lookup.ids[-2] if len(self.lookup.ids) > 1 else -1

    def learn(
        self, draft: Draft, path: Sequence[int], answers: Sequence[int], new: Sequence[int]
    ) -> None:
        """Learn which drafts were accepted, and the model's answer after each of them.

        Args:
            path: the accepted nodes, the root first.
            answers: by node, the most likely token after it. After a rejected draft it answers
                another text, but the same words often come up again.
            new: the tokens that were added to the text.
        """
        if self._uses_lookup:
            if len(self._answers) > ANSWERS_AT_MOST:
                self._answers.clear()
            ids, parents = draft.tree.ids, draft.tree.parents
            for token, parent, answer in zip(ids, parents, answers, strict=True):
                if answer < self._d_vocab:
                    before = ids[parent] if parent >= 0 else self._token_before
                    self._answers[token,] = self._answers[before, token] = answer
        for node in path:
            accepted = next((n for n in path if draft.tree.parents[n] == node), None)
            for child, parent in enumerate(draft.tree.parents):
                kind = draft.kinds[child]
                if parent == node and kind is not None:
                    self.chances.record(kind, child == accepted)
        for token in new:
            self.add(token)


def _depth_first(nodes: Sequence[_Candidate]) -> Draft:
    """Nodes depth first, most likely first: if that path is accepted, the cache is in order."""
    order, waiting = [], [0]
    while waiting:
        order.append(waiting.pop())
        waiting += reversed([n for n, node in enumerate(nodes) if node.parent == order[-1]])
    place = {node: new for new, node in enumerate(order)} | {-1: -1}
    ordered = [nodes[n] for n in order]
    tree = Tree(tuple(n.token for n in ordered), tuple(place[n.parent] for n in ordered))
    return Draft(tree, tuple(n.kind for n in ordered), tuple(n.chance for n in ordered))
