"""Exact speculative decoding: draft cheaply, verify several tokens in one pass.

In: a cursor over the model, a token chooser, a drafter. Out: the tokens that the full model
chooses, often several per pass; and how many drafts were accepted.

Every token is chosen from the full model's own logits, given exactly the text before it. A draft
only decides whether the logits after it are already available. So the text is the one that the
model writes without drafts, sampled or not, up to the rounding of passes over several tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.draft_tree import Drafter
from layerleap.act.decode.sampling import TokenChooser
from layerleap.models.cursor.cursor import Cursor, PassEnd
from layerleap.models.cursor.tree import Tree
from layerleap.models.discovery.probe import vocabulary_size
from layerleap.read.lens import Lens


@torch.no_grad()
def speculate(
    cursor: Cursor,
    chooser: TokenChooser,
    drafter: Drafter,
    stats: DecodingStats,
    *,
    most_length: int,
) -> None:
    """Generate until the chooser is finished.

    Args:
        cursor: inside its `with`; it holds only positions of the text before.
        chooser: the text so far, with at least one token that has not been run.
        drafter: proposes the drafts.
        stats: updated after every pass.
        most_length: number of positions that the model has.
    """
    begin(cursor, chooser, drafter, stats)
    while not chooser.is_finished:
        room = min(stats.draft_room(len(chooser.chosen)), most_length - cursor.length - 1)
        draft = drafter.draw(chooser.chosen[-1], max(0, room))
        ran = cursor.run(draft.tree)
        path, answers = verify(cursor, chooser, ran, draft.tree, stats)
        drafter.learn(draft, path, answers, chooser.chosen[-len(path) :])


def begin(cursor: Cursor, chooser: TokenChooser, drafter: Drafter, stats: DecodingStats) -> None:
    """Read the text so far and choose the first token."""
    drafter.begin(chooser.text)
    ran = cursor.run(chooser.text[cursor.length :])
    drafter.add(_choose(cursor, chooser, ran, stats))


def verify(
    cursor: Cursor, chooser: TokenChooser, ran: PassEnd, tree: Tree, stats: DecodingStats
) -> tuple[list[int], list[int]]:
    """Accept drafts along the tree as long as they are right, and cut the rest from the cache.

    Returns:
        The accepted nodes, and for every node the most likely token after it.
    """
    logits = cursor.transformer.logits(ran.h[len(ran.h) - len(tree) :])
    path = follow(chooser, logits, tree)
    cursor.keep(path, tree)
    stats.record_pass(tokens=len(path), drafts=len(tree) - 1, layer=ran.layer)
    return path, logits.argmax(-1).tolist()


def follow(chooser: TokenChooser, logits: Tensor, tree: Tree) -> list[int]:
    """Choose a token after node after node, as long as the chosen token is itself a node."""
    path = [0]
    while True:
        token = chooser(logits[path[-1]])
        child = tree.children(path[-1]).get(token)
        if chooser.is_finished or child is None:
            return path
        path.append(child)


def _choose(cursor: Cursor, chooser: TokenChooser, ran: PassEnd, stats: DecodingStats) -> int:
    token = chooser(cursor.transformer.logits(ran.h[-1:])[0])
    stats.record_pass(tokens=1, layer=ran.layer, is_prompt=True)
    return token


@torch.no_grad()
def speculate_early(
    cursor: Cursor,
    chooser: TokenChooser,
    lens: Lens,
    layer: int,
    stats: DecodingStats,
    *,
    most: int = 4,
    least_p: float = 0.4,
    most_length: int,
) -> None:
    """The same with drafts read from an early layer, whose computation the verification reuses.

    Args:
        cursor: inside its `with`.
        chooser: the text so far.
        lens: reads the early layer.
        layer: where tokens wait while drafts follow one another.
        stats: updated after every pass.
        most: maximum number of drafts in a row.
        least_p: a draft less likely than this is not followed.
        most_length: number of positions that the model has.
    """
    d_vocab = vocabulary_size(cursor.transformer.model)  # some heads have more rows
    token = _choose(cursor, chooser, cursor.run(chooser.text[cursor.length :]), stats)
    stop: Callable[..., bool] = lambda *_: True  # noqa: E731
    while not chooser.is_finished:
        drafts = [token]
        left = min(stats.draft_room(len(chooser.chosen)), most_length - cursor.length - 1)
        room = max(0, min(most, left))
        while True:
            ran = cursor.run(drafts[-1:], watch=stop, checks=[layer])
            if len(drafts) > room:
                break
            p, best = lens.logits(ran.h[-1:], layer)[0].float().softmax(-1)[:d_vocab].max(0)
            if p < least_p:
                break
            drafts.append(int(best))
        verify(cursor, chooser, cursor.run([]), Tree.chain(drafts), stats)
        token = chooser.chosen[-1]
