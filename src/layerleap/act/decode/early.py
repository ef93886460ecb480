"""Early-exit decoding: each token runs through as many layers as a rule asks for.

In: a cursor over the model, a token chooser, a lens, a rule. Out: tokens read where the rule stops.

Later tokens need keys and values from the layers that a token skipped. A policy makes them:

    recompute   computed by those layers themselves, together with the next token that gets there:
                keys and values are exact, so exits are those of a replay on the same text
    propagate   computed from the state at the exit, as if the layers above changed nothing
    shortcut    computed from the bank's prediction of the state at each layer above

Under every policy, a token that exits early is read early: the text is an approximation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.live import LiveChecks
from layerleap.act.decode.sampling import Processor, TokenChooser
from layerleap.act.decode.shortlist import Shortlist
from layerleap.models.cursor.cursor import Carry, Cursor
from layerleap.read.lens import Lens, chunks

Policy = Literal["recompute", "propagate", "shortcut"]
POLICIES = {
    "recompute": "skipped layers are run later, with the next token that needs them: exact",
    "propagate": "skipped layers take the state at the exit as theirs: an approximation",
    "shortcut": "skipped layers take the state that the bank predicts: an approximation",
}


def carry_of(policy: Policy, lens: Lens) -> Carry | None:
    """How a state gets to the layers it skips; None if they are run later."""
    if policy == "recompute":
        return None
    bank = lens.bank
    if policy == "propagate" or bank is None:
        return lambda h, src, dst: h
    return lambda h, src, dst: h if src == dst else bank[src, dst](h)


@torch.no_grad()
def decode_early(
    cursor: Cursor,
    chooser: TokenChooser,
    checks_at: Callable[[int], LiveChecks],
    stats: DecodingStats,
    *,
    lens: Lens,
    checks: Sequence[int],
    policy: Policy = "recompute",
    shortlist: Shortlist | None = None,
) -> None:
    """Generate until the chooser is finished; the prompt runs through all layers.

    Args:
        cursor: inside its `with`.
        chooser: the text so far, with at least one token that has not been run.
        checks_at: from a position to the checks of that position.
        stats: updated after every token.
        lens: reads a state where it exits.
        checks: layers at which the rule is checked.
        policy: how keys and values of skipped layers are made.
        shortlist: the tokens that an early exit chooses from; None reads the whole head.
    """
    carry, transformer = carry_of(policy, lens), cursor.transformer
    ran = cursor.run(chooser.text[cursor.length :])
    stats.current_layer = ran.layer
    token = chooser(transformer.logits(ran.h[-1:])[0])
    stats.record_pass(tokens=1, layer=ran.layer, is_prompt=True)
    while not chooser.is_finished:
        live = checks_at(cursor.length)
        ran = cursor.run([token], watch=live, checks=checks, carry=carry)
        stats.current_layer = ran.layer
        read = partial(_logits, lens, live, ran.h[-1:], ran.layer)
        token = chooser(read(shortlist), None if shortlist is None else partial(read, None))
        stats.record_pass(tokens=1, layer=ran.layer)
    if cursor.waiting:
        cursor.run([])  # completes the cache for its next user
        stats.record_end()


def _logits(
    lens: Lens, live: LiveChecks, h: Tensor, layer: int, shortlist: Shortlist | None
) -> Tensor:
    if layer == lens.transformer.n_layers:
        return lens.transformer.logits(h)[0]
    if shortlist is not None:
        logits = live.shortlist_logits
        return shortlist.expand(shortlist.logits(lens.map(layer)(h)) if logits is None else logits)[
            0
        ]
    if live.logits is not None:
        return live.logits[0]
    return lens.logits(h, layer)[0]


@torch.no_grad()
def agreements(writer: Cursor, chooser: TokenChooser, processor: Processor) -> list[bool]:
    """For each chosen token: is it what the full model chooses after the same text?

    Args:
        writer: the cursor that wrote the text; edits in force apply here as they did there.
        chooser: the finished text.
        processor: a copy from before the text; some processors remember what they have seen.
    """
    transformer = writer.transformer
    with Cursor(transformer, writer.axes, text=writer.text, prompt=writer.prompt) as cursor:
        h = cursor.run(chooser.text[:-1]).h[-len(chooser.chosen) :]
    agrees: list[bool] = []
    for rows in chunks(len(h), transformer.d_vocab):
        for logits in transformer.logits(h[rows]):
            place = chooser.ids.shape[1] - len(chooser.chosen) + len(agrees)
            scores = processor(chooser.ids[:, :place], logits.float()[None].to(chooser.ids.device))
            agrees.append(int(scores.argmax()) == int(chooser.ids[0, place]))
    return agrees
