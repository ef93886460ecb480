"""Exact decoding, several tokens to a pass: guess cheaply, let the full model judge.

In: a walk over the model, a chooser, a drafter. Out: the tokens that the full model chooses, one
pass for several of them; what was tried and what was right.

Every token is chosen from the full model's own logits, given exactly the text before it. A guess
only decides whether the logits that follow it are at hand already. So the text is the one that the
model alone would write, sampled or not, up to how a pass over several tokens is rounded.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layerleap.act.account import Account
from layerleap.act.choose import Choice
from layerleap.act.draft_tree import Beside, Drafted, Drafter
from layerleap.models.abreast import Abreast
from layerleap.models.probe import vocabulary_size
from layerleap.models.tree import Tree
from layerleap.models.walk import Ran, Walk
from layerleap.read.lens import Lens


@torch.no_grad()
def speculate(
    walk: Walk, choice: Choice, drafter: Drafter, account: Account, *, most_length: int
) -> None:
    """Write until the chooser is finished.

    Args:
        walk: inside its `with`; it holds nothing but what was computed of the text before.
        choice: the text so far, of which at least one token has not been run.
        drafter: where guesses come from.
        account: notes every pass.
        most_length: positions that the model has.
    """
    ids = choice.text
    drafter.begin(ids)
    ran = walk.run(ids[walk.length :])
    token = _choose(walk, choice, ran, 0, account)
    while not choice.is_finished:
        drafter.note(token)
        room = max(0, min(account.room(len(choice.chosen)), most_length - walk.length - 1))
        drafted = drafter.draw(token, room)
        ran = walk.run(drafted.tree)
        path, said = judge(walk, choice, ran, drafted.tree, account)
        drafter.learn(drafted, path, said)
        for node in path[1:]:
            drafter.note(drafted.tree.ids[node])
        token = choice.chosen[-1]


def judge(
    walk: Walk, choice: Choice, ran: Ran, tree: Tree, account: Account
) -> tuple[list[int], list[int]]:
    """Choose along the tree as long as guesses are right; only what is right stays in the cache.

    Returns the nodes that were right, and by node the token that is likeliest after it.
    """
    logits = walk.transformer.logits(ran.h[len(ran.h) - len(tree) :])
    path = follow(choice, logits, tree)
    walk.keep(path, tree)
    account.passed(tokens=len(path), tried=len(tree) - 1, layer=ran.layer)
    return path, logits.argmax(-1).tolist()


def follow(choice: Choice, logits: Tensor, tree: Tree) -> list[int]:
    """Choose from the logits of node after node, as long as what is chosen is a node itself."""
    path = [0]
    while True:
        token = choice(logits[path[-1]])
        child = tree.children(path[-1]).get(token)
        if choice.is_finished or child is None:
            return path
        path.append(child)


@torch.no_grad()
def speculate_abreast(
    walk: Abreast,
    choices: Sequence[Choice],
    drafter: Drafter,
    accounts: Sequence[Account],
    *,
    most_length: int,
) -> None:
    """Write several texts at once, until all are finished: one pass serves them all.

    Args:
        walk: inside its `with`, and empty.
        choices: the texts so far.
        drafter: where guesses come from; what it learns of one text serves the others.
        accounts: note every pass, one for each text.
        most_length: positions that the model has.
    """
    drafters = [drafter.twin() for _ in choices]
    logits, last = walk.transformer.logits, walk.transformer.n_layers
    for n, (choice, own) in enumerate(zip(choices, drafters, strict=True)):
        own.begin(choice.text)
        read = walk.run_all({n: Tree.chain(choice.text)})[n]
        walk.keep_all({n: range(len(read))})
        own.note(choice(logits(read[-1:])[0]))
        accounts[n].passed(tokens=1, layer=last, is_prompt=True)
    while still := [n for n, choice in enumerate(choices) if not choice.is_finished]:
        beside, drafted = Beside(len(still) - 1, len(still) - 1.0), dict[int, Drafted]()
        for n in still:
            places = most_length - walk.length_of(n) - 1
            room = max(0, min(accounts[n].room(len(choices[n].chosen)), places))
            drafted[n] = drafters[n].draw(choices[n].chosen[-1], room, beside)
            beside.nodes += len(drafted[n].tree) - 1
            beside.expected += sum(drafted[n].chances) - 1
        h = walk.run_all({n: found.tree for n, found in drafted.items()})
        sizes = [len(found.tree) for found in drafted.values()]
        rows = dict(zip(h, logits(torch.cat(list(h.values()))).split(sizes), strict=True))
        paths = dict[int, list[int]]()
        for n, found in drafted.items():
            paths[n] = path = follow(choices[n], rows[n], found.tree)
            accounts[n].passed(tokens=len(path), tried=len(found.tree) - 1, layer=last)
            drafters[n].learn(found, path, rows[n].argmax(-1).tolist())
            for token in choices[n].chosen[-len(path) :]:
                drafters[n].note(token)
        walk.keep_all(paths)


def _choose(walk: Walk, choice: Choice, ran: Ran, tried: int, account: Account) -> int:
    token = choice(walk.transformer.logits(ran.h[-1:])[0])
    account.passed(tokens=1, tried=tried, layer=ran.layer, is_prompt=True)
    return token


@torch.no_grad()
def speculate_early(
    walk: Walk,
    choice: Choice,
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
    token = _choose(walk, choice, walk.run(choice.text[walk.length :]), 0, account)
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
