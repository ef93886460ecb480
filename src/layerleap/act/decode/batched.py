"""Exact decoding of several texts at once: texts share passes, not context.

In: the texts of a batch. Out: which texts are decoded together, and for each the tokens that the
full model chooses, as if it were alone.

The weights are read once for all texts of a pass, so drafts gain less than for a single text. Each
text gets the drafts that pay off given what the pass already holds. The cost of a pass is learned
on the way: tokens also skip over the keys of other texts, which the passes measured beforehand do
not include.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.draft_tree import Draft, Drafter, SharedPass
from layerleap.act.decode.sampling import TokenChooser
from layerleap.act.decode.speculative import follow
from layerleap.models.cursor.batch import BatchCursor

TEXTS = 8  # at most, per pass
KEYS = 2048  # at most, in one cache: skipping over the keys of other texts takes time


def groups(
    choosers: Sequence[TokenChooser], max_length: int, *, most: int = TEXTS
) -> Iterator[list[TokenChooser]]:
    """The texts in order, in groups that are decoded together.

    Args:
        choosers: the texts, before any token is generated.
        max_length: maximum length of a text, including padding.
        most: maximum number of texts per group.
    """
    group: list[TokenChooser] = []
    keys = 0
    for chooser in choosers:
        own = max_length - chooser.skip
        if group and (len(group) == min(most, TEXTS) or keys + own > KEYS):
            yield group
            group, keys = [], 0
        group.append(chooser)
        keys += own
    if group:
        yield group


@torch.no_grad()
def speculate_batch(
    cursor: BatchCursor,
    choosers: Sequence[TokenChooser],
    drafters: Sequence[Drafter],
    stats: Sequence[DecodingStats],
    *,
    most_length: int,
) -> None:
    """Generate until all texts are finished.

    Args:
        cursor: inside its `with`; unfinished texts have joined it under their index.
        choosers: the texts, each with its first token chosen.
        drafters: one per text, all twins of each other.
        stats: one per text, updated after every pass.
        most_length: number of positions that the model has.
    """
    last = cursor.transformer.n_layers
    started = time.perf_counter()
    while unfinished := [n for n, chooser in enumerate(choosers) if not chooser.is_finished]:
        lengths, drafts = cursor.lengths(), dict[int, Draft]()
        shared = SharedPass(len(unfinished) - 1, len(unfinished) - 1.0)
        for n in unfinished:
            room = min(stats[n].draft_room(len(choosers[n].chosen)), most_length - lengths[n] - 1)
            drafts[n] = drafters[n].draw(choosers[n].chosen[-1], max(0, room), shared)
            shared.nodes += len(drafts[n].tree) - 1
            shared.expected += sum(drafts[n].chances) - 1
        h = cursor.run_all({n: draft.tree for n, draft in drafts.items()})
        logits = cursor.transformer.logits(torch.cat(list(h.values())))
        rows = logits.split([len(draft.tree) for draft in drafts.values()])
        paths = dict[int, list[int]]()
        for (n, draft), own in zip(drafts.items(), rows, strict=True):
            paths[n] = path = follow(choosers[n], own, draft.tree)
            stats[n].record_pass(tokens=len(path), drafts=len(draft.tree) - 1, layer=last)
            answers = own.argmax(-1).tolist()
            drafters[n].learn(draft, path, answers, choosers[n].chosen[-len(path) :])
        cursor.keep_all(paths)
        now = time.perf_counter()
        drafters[0].record_time(len(logits), now - started)
        started = now
        for n in unfinished:
            if choosers[n].is_finished:
                cursor.leave(n)
