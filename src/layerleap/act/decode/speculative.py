"""Exact speculative decoding: draft cheaply, verify several tokens in one pass.

In: a cursor over the model, a token chooser, a drafter. Out: the tokens that the full model
chooses, often several per pass; and how many drafts were accepted.

Every token is chosen from the full model's own logits, given exactly the text before it. A draft
only decides whether the logits after it are already available. So the text is the one that the
model writes without drafts, sampled or not, up to the rounding of passes over several tokens.

Several texts share passes, not context. The weights are read once for all texts of a pass, so
drafts gain less than for a single text: each text gets the drafts that pay off given what the pass
already holds. The cost of a pass is learned on the way: tokens also skip over the keys of other
texts, which the passes measured beforehand do not include.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.draft_tree import Draft, Drafter, SharedPass
from layerleap.act.decode.sampling import TokenChooser
from layerleap.lens.lens import Lens
from layerleap.models.cursor.batch import BatchCursor
from layerleap.models.cursor.cursor import Cursor, PassEnd
from layerleap.models.cursor.tree import Tree
from layerleap.models.discovery.probe import vocabulary_size

TEXTS = 8  # at most, per pass
KEYS = 2048  # at most, in one cache: skipping over the keys of other texts takes time
LEAST_P = 0.4  # least probability of a draft that an early layer predicts


@torch.no_grad()
def speculate(
    cursor: Cursor,
    chooser: TokenChooser,
    drafter: Drafter,
    stats: DecodingStats,
    tie_steps: float = 0.0,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Generate until the chooser is finished, or `until`, called before each pass, returns True.

    The text has begun, and the cursor is inside its `with`. Where the two best logits are at most
    `tie_steps` rounding steps apart, a pass of its own decides.
    """
    while not chooser.is_finished and not until():
        n_before = len(chooser.chosen)
        draft = drafter.draw(chooser.chosen[-1], stats.draft_room)
        ran = cursor.run(draft.tree)
        path, answers = _verify(cursor, chooser, ran, draft.tree, stats, tie_steps)
        drafter.learn(draft, path, answers, chooser.chosen[n_before:])


@torch.no_grad()
def begin(cursor: Cursor, chooser: TokenChooser, drafter: Drafter, stats: DecodingStats) -> None:
    """Read the text so far, of which the cursor lacks a token or more, and choose the next one."""
    drafter.begin(chooser.text)
    ran = cursor.run(chooser.text[cursor.length :])
    token = chooser(cursor.transformer.logits(ran.h[-1:])[0])
    stats.record_pass(tokens=1, layer=ran.layer, is_prompt=True)
    drafter.add(token)


def _verify(
    cursor: Cursor,
    chooser: TokenChooser,
    ran: PassEnd,
    tree: Tree,
    stats: DecodingStats,
    tie_steps: float = 0.0,
) -> tuple[list[int], list[int]]:
    """Accept drafts along the tree as long as they are right, and cut the rest from the cache.

    Returns:
        The accepted nodes, and for every node the most likely token after it.
    """
    logits = cursor.transformer.logits(ran.h[len(ran.h) - len(tree) :])
    path, is_tied = _follow(chooser, logits, tree, tie_steps)
    decided = path[:-1] if is_tied else path
    cursor.keep(decided, tree)
    stats.record_pass(tokens=len(decided), drafts=len(tree) - 1, layer=ran.layer)
    if is_tied:
        alone = cursor.run(chooser.chosen[-1:])
        chooser(cursor.transformer.logits(alone.h[-1:])[0])
        stats.record_tie(layer=alone.layer)
    return path, logits.argmax(-1).tolist()


def _follow(
    chooser: TokenChooser, logits: Tensor, tree: Tree, tie_steps: float
) -> tuple[list[int], bool]:
    """Choose a token after node after node, as long as the chosen token is itself a node.

    Returns:
        The nodes, and whether the token after the last one is left undecided: in a pass over
        several tokens rounding may have changed which of two logits is larger.
    """
    has_ties = tie_steps > 0 and len(tree) > 1 and not chooser.sample
    tied = near_ties(logits, tie_steps) if has_ties else [False] * len(tree)
    path = [0]
    while not tied[path[-1]]:
        token = chooser(logits[path[-1]])
        child = tree.children(path[-1]).get(token)
        if chooser.is_finished or child is None:
            return path, False
        path.append(child)
    return path, True


def near_ties(logits: Tensor, steps: float) -> list[bool]:
    """For each row: are the two best logits at most this many rounding steps apart?"""
    best, second = logits.topk(2).values.float().unbind(-1)
    step = torch.finfo(logits.dtype).eps * best.abs()
    return (best - second <= steps * step).tolist()


@torch.no_grad()
def speculate_early(
    cursor: Cursor,
    chooser: TokenChooser,
    lens: Lens,
    layer: int,
    stats: DecodingStats,
    *,
    most: int,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """The same with drafts read from an early layer, whose computation the verification reuses.

    Tokens wait at `layer` while up to `most` drafts follow one another, each with a probability of
    at least `LEAST_P`.
    """
    d_vocab = vocabulary_size(cursor.transformer.model)  # some heads have more rows
    while not chooser.is_finished and not until():
        drafts = chooser.chosen[-1:]
        room = min(most, stats.draft_room)
        while True:
            ran = cursor.run(drafts[-1:], watch=lambda *_: True, checks=[layer])
            if len(drafts) > room:
                break
            p, best = lens.logits(ran.h[-1:], layer)[0].float().softmax(-1)[:d_vocab].max(0)
            if p < LEAST_P:
                break
            drafts.append(int(best))
        _verify(cursor, chooser, cursor.run([]), Tree.chain(drafts), stats)


def groups(
    choosers: Sequence[TokenChooser], max_length: int, *, most: int = TEXTS
) -> Iterator[list[TokenChooser]]:
    """The texts in order, in groups of `most` or fewer that are decoded together.

    `max_length` is the maximum length of a text, including padding.
    """
    group: list[TokenChooser] = []
    n_keys = 0
    for chooser in choosers:
        length = max_length - chooser.skip
        if group and (len(group) == min(most, TEXTS) or n_keys + length > KEYS):
            yield group
            group, n_keys = [], 0
        group.append(chooser)
        n_keys += length
    if group:
        yield group


@torch.no_grad()
def speculate_batch(
    cursor: BatchCursor,
    choosers: Sequence[TokenChooser],
    drafters: Sequence[Drafter],
    stats: Sequence[DecodingStats],
    tie_steps: float = 0.0,
) -> None:
    """Generate until all texts are finished.

    Each text has its first token, and a drafter that shares what it learns with the others.
    Unfinished texts have joined the cursor, which is inside its `with`, under their index.
    """
    last = cursor.transformer.n_layers
    started = time.perf_counter()
    while unfinished := [n for n, chooser in enumerate(choosers) if not chooser.is_finished]:
        drafts = dict[int, Draft]()
        shared = SharedPass(len(unfinished) - 1, len(unfinished) - 1.0)
        for n in unfinished:
            drafts[n] = drafters[n].draw(choosers[n].chosen[-1], stats[n].draft_room, shared)
            shared.nodes += len(drafts[n].tree) - 1
            shared.expected += sum(drafts[n].chances) - 1
        h = cursor.run_all({n: draft.tree for n, draft in drafts.items()})
        logits = cursor.transformer.logits(torch.cat(list(h.values())))
        rows = logits.split([len(draft.tree) for draft in drafts.values()])
        paths, tied = dict[int, list[int]](), list[int]()
        for (n, draft), text_logits in zip(drafts.items(), rows, strict=True):
            n_before = len(choosers[n].chosen)
            path, is_tied = _follow(choosers[n], text_logits, draft.tree, tie_steps)
            paths[n] = path[:-1] if is_tied else path
            stats[n].record_pass(tokens=len(paths[n]), drafts=len(draft.tree) - 1, layer=last)
            answers, new = text_logits.argmax(-1).tolist(), choosers[n].chosen[n_before:]
            drafters[n].learn(draft, path, answers, new)
            if is_tied:
                tied.append(n)
        cursor.keep_all(paths)
        for n in tied:
            h = cursor.run_all({n: Tree.chain(choosers[n].chosen[-1:])})
            drafters[n].add(choosers[n](cursor.transformer.logits(h[n])[0]))
            stats[n].record_tie(layer=last)
            cursor.keep_all({n: [0]})
        now = time.perf_counter()
        drafters[0].record_time(len(logits), now - started)
        started = now
        for n in unfinished:
            if choosers[n].is_finished:
                cursor.leave(n)
