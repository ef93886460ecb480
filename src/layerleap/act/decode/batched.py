"""Several texts written at once, exactly: passes are shared, texts are not.

In: the texts of a batch. Out: which of them go together, and the tokens that the full model chooses
for each, as if it were alone.

One reading of the weights serves all texts of a pass, so there is less to gain from guesses: each
text gets those that are worth it beside what the pass holds already. What passes cost is learned on
the way: tokens look past the keys of other texts, which passes measured beforehand do not.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from layerleap.act.decode.account import Account
from layerleap.act.decode.draft_tree import Draft, Drafter, SharedPass
from layerleap.act.decode.sampling import TokenChooser
from layerleap.act.decode.speculative import follow
from layerleap.models.cursor.batch import BatchCursor

TEXTS = 8  # that share passes at most
KEYS = 2048  # of theirs in one cache: every token looks past those of other texts, which takes time


def groups(
    choices: Sequence[TokenChooser], max_length: int, *, most: int = TEXTS
) -> Iterator[list[TokenChooser]]:
    """The texts in turn, as many together as may be.

    Args:
        choices: before anything is written.
        max_length: that texts may get, padding included.
        most: texts together.
    """
    group: list[TokenChooser] = []
    keys = 0
    for choice in choices:
        own = max_length - choice.skip
        if group and (len(group) == min(most, TEXTS) or keys + own > KEYS):
            yield group
            group, keys = [], 0
        group.append(choice)
        keys += own
    if group:
        yield group


@torch.no_grad()
def share(
    walk: BatchCursor,
    choices: Sequence[TokenChooser],
    drafters: Sequence[Drafter],
    accounts: Sequence[Account],
    *,
    most_length: int,
) -> None:
    """Write until all texts are finished.

    Args:
        walk: inside its `with`; unfinished texts have joined it by their number here.
        choices: the texts, of each the first token chosen.
        drafters: where guesses come from, one for each text, twins of each other.
        accounts: note every pass, one for each text.
        most_length: positions that the model has.
    """
    last = walk.transformer.n_layers
    started = time.perf_counter()
    while still := [n for n, choice in enumerate(choices) if not choice.is_finished]:
        known, drafted = walk.lengths(), dict[int, Draft]()
        beside = SharedPass(len(still) - 1, len(still) - 1.0)
        for n in still:
            room = min(accounts[n].room(len(choices[n].chosen)), most_length - known[n] - 1)
            drafted[n] = drafters[n].draw(choices[n].chosen[-1], max(0, room), beside)
            beside.nodes += len(drafted[n].tree) - 1
            beside.expected += sum(drafted[n].chances) - 1
        h = walk.run_all({n: found.tree for n, found in drafted.items()})
        logits = walk.transformer.logits(torch.cat(list(h.values())))
        rows = logits.split([len(found.tree) for found in drafted.values()])
        paths = dict[int, list[int]]()
        for (n, found), own in zip(drafted.items(), rows, strict=True):
            paths[n] = path = follow(choices[n], own, found.tree)
            accounts[n].passed(tokens=len(path), tried=len(found.tree) - 1, layer=last)
            said = own.argmax(-1).tolist()
            drafters[n].learn(found, path, said, choices[n].chosen[-len(path) :])
        walk.keep_all(paths)
        now = time.perf_counter()
        drafters[0].took(len(logits), now - started)
        started = now
        for n in still:
            if choices[n].is_finished:
                walk.leave(n)
