"""Exact decoding, several tokens to a pass: guess cheaply, let the full model judge.

In: a walk over the model, a chooser, a drafter. Out: the tokens that the full model chooses, one
pass for several of them; what was tried and what was right.

Every token is chosen from the full model's own logits, given exactly the text before it. A guess
only decides whether the logits that follow it are at hand already. So the text is the one that the
model alone would write, sampled or not, up to how a pass over several tokens is rounded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from layerleap.act.decode.account import Account
from layerleap.act.decode.draft_tree import Drafter
from layerleap.act.decode.sampling import TokenChooser
from layerleap.models.cursor.cursor import Cursor, PassEnd
from layerleap.models.cursor.tree import Tree
from layerleap.models.discovery.probe import vocabulary_size
from layerleap.read.lens import Lens


@torch.no_grad()
def speculate(
    walk: Cursor, choice: TokenChooser, drafter: Drafter, account: Account, *, most_length: int
) -> None:
    """Write until the chooser is finished.

    Args:
        walk: inside its `with`; it holds nothing but what was computed of the text before.
        choice: the text so far, of which at least one token has not been run.
        drafter: where guesses come from.
        account: notes every pass.
        most_length: positions that the model has.
    """
    begin(walk, choice, drafter, account)
    while not choice.is_finished:
        room = max(0, min(account.room(len(choice.chosen)), most_length - walk.length - 1))
        drafted = drafter.draw(choice.chosen[-1], room)
        ran = walk.run(drafted.tree)
        path, said = judge(walk, choice, ran, drafted.tree, account)
        drafter.learn(drafted, path, said, choice.chosen[-len(path) :])


def begin(walk: Cursor, choice: TokenChooser, drafter: Drafter, account: Account) -> None:
    """Read the text so far, and choose the first token."""
    drafter.begin(choice.text)
    ran = walk.run(choice.text[walk.length :])
    drafter.note(_choose(walk, choice, ran, account))


def judge(
    walk: Cursor, choice: TokenChooser, ran: PassEnd, tree: Tree, account: Account
) -> tuple[list[int], list[int]]:
    """Choose along the tree as long as guesses are right; only what is right stays in the cache.

    Returns the nodes that were right, and by node the token that is likeliest after it.
    """
    logits = walk.transformer.logits(ran.h[len(ran.h) - len(tree) :])
    path = follow(choice, logits, tree)
    walk.keep(path, tree)
    account.passed(tokens=len(path), tried=len(tree) - 1, layer=ran.layer)
    return path, logits.argmax(-1).tolist()


def follow(choice: TokenChooser, logits: Tensor, tree: Tree) -> list[int]:
    """Choose from the logits of node after node, as long as what is chosen is a node itself."""
    path = [0]
    while True:
        token = choice(logits[path[-1]])
        child = tree.children(path[-1]).get(token)
        if choice.is_finished or child is None:
            return path
        path.append(child)


def _choose(walk: Cursor, choice: TokenChooser, ran: PassEnd, account: Account) -> int:
    token = choice(walk.transformer.logits(ran.h[-1:])[0])
    account.passed(tokens=1, layer=ran.layer, is_prompt=True)
    return token


@torch.no_grad()
def speculate_early(
    walk: Cursor,
    choice: TokenChooser,
    lens: Lens,
    layer: int,
    account: Account,
    *,
    most: int = 4,
    least_p: float = 0.4,
    most_length: int,
) -> None:
    """The same, with guesses that an early layer makes; its work serves the judgement too.

    Args:
        walk: inside its `with`.
        choice: the text so far.
        lens: reads the early layer.
        layer: where tokens wait while guesses follow one another.
        account: notes every pass.
        most: guesses in a row.
        least_p: a guess less likely than this is not followed.
        most_length: positions that the model has.
    """
    known = vocabulary_size(walk.transformer.model)  # some heads have more
    token = _choose(walk, choice, walk.run(choice.text[walk.length :]), account)
    stop: Callable[..., bool] = lambda *_: True  # noqa: E731
    while not choice.is_finished:
        guesses = [token]
        room = max(0, min(most, account.room(len(choice.chosen)), most_length - walk.length - 1))
        while True:
            ran = walk.run(guesses[-1:], watch=stop, checks=[layer])
            if len(guesses) > room:
                break
            p, best = lens.logits(ran.h[-1:], layer)[0].float().softmax(-1)[:known].max(0)
            if p < least_p:
                break
            guesses.append(int(best))
        judge(walk, choice, walk.run([]), Tree.chain(guesses), account)
        token = choice.chosen[-1]
