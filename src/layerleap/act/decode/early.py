"""Adaptive decoding: each token is carried as far as a rule wants it.

In: a walk over the model, a chooser, a lens, a rule. Out: tokens read where the rule stopped.

What later tokens need of the layers that a token did not see is made by a policy:

    recompute   computed by those layers themselves, along with the next token that gets there:
                keys and values are exact, so exits are those of a replay on the same text
    propagate   made from the state at the exit, as if the layers above had changed nothing
    shortcut    made from what the bank's map predicts the state would be at each layer above

Whatever the policy, a token that leaves early is read early: the text is an approximation.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from layerleap.act.decode.account import Account
from layerleap.act.decode.live import LiveChecks
from layerleap.act.decode.sampling import Processor, TokenChooser
from layerleap.act.decode.shortlist import Shortlist
from layerleap.models.cursor.cursor import Carry, Cursor
from layerleap.read.lens import Lens, chunks

Policy = Literal["recompute", "propagate", "shortcut"]
POLICIES = {
    "recompute": "skipped layers are run later, with the next token that needs them: exact",
    "propagate": "skipped layers take the state at the exit for their own: an approximation",
    "shortcut": "skipped layers take what the bank predicts for them: an approximation",
}


def carry_of(policy: Policy, lens: Lens) -> Carry | None:
    """How a state gets to layers that are skipped; None if they are run later."""
    if policy == "recompute":
        return None
    bank = lens.bank
    if policy == "propagate" or bank is None:
        return lambda h, src, dst: h
    return lambda h, src, dst: h if src == dst else bank[src, dst](h)


@torch.no_grad()
def adapt(
    walk: Cursor,
    choice: TokenChooser,
    looks: Callable[[int], LiveChecks],
    account: Account,
    *,
    lens: Lens,
    checks: Sequence[int],
    policy: Policy = "recompute",
    shortlist: Shortlist | None = None,
) -> None:
    """Write until the chooser is finished; the prompt is run in full.

    Args:
        walk: inside its `with`.
        choice: the text so far, of which at least one token has not been run.
        looks: from a position to what will look at it.
        account: notes every token.
        lens: reads a state where it leaves.
        checks: layers at which the rule is asked.
        policy: what is done about layers that a token skips.
        shortlist: what a token that leaves early is chosen from; None reads the whole head.
    """
    carry, transformer = carry_of(policy, lens), walk.transformer
    ran = walk.run(choice.text[walk.length :])
    account.reading = ran.layer
    token = choice(transformer.logits(ran.h[-1:])[0])
    account.passed(tokens=1, layer=ran.layer, is_prompt=True)
    while not choice.is_finished:
        look = looks(walk.length)
        ran = walk.run([token], watch=look, checks=checks, carry=carry)
        account.reading = ran.layer
        read = partial(_logits, lens, look, ran.h[-1:], ran.layer)
        token = choice(read(shortlist), None if shortlist is None else partial(read, None))
        account.passed(tokens=1, layer=ran.layer)
    if walk.waiting:
        walk.run([])  # so that the cache is whole, whoever uses it next
        account.closed()


def _logits(
    lens: Lens, look: LiveChecks, h: Tensor, layer: int, shortlist: Shortlist | None
) -> Tensor:
    if layer == lens.transformer.n_layers:
        return lens.transformer.logits(h)[0]
    if shortlist is not None:
        few = look.few if look.few is not None else shortlist.logits(lens.map(layer)(h))
        return shortlist.spread(few)[0]
    if look.logits is not None:
        return look.logits[0]
    return lens.logits(h, layer)[0]


@torch.no_grad()
def agreements(walk: Cursor, choice: TokenChooser, processor: Processor) -> list[bool]:
    """Of each token chosen: is it what the full model chooses after the same text?

    Args:
        walk: the cursor that wrote the text; edits in force apply here as they did there.
        choice: the text, finished.
        processor: as it was before the text; some of them remember what they have seen.
    """
    transformer = walk.transformer
    with Cursor(transformer, walk.axes, text=walk.text, prompt=walk.prompt) as cursor:
        h = cursor.run(choice.text[:-1]).h[-len(choice.chosen) :]
    found: list[bool] = []
    for rows in chunks(len(h), transformer.d_vocab):
        for logits in transformer.logits(h[rows]):
            place = choice.ids.shape[1] - len(choice.chosen) + len(found)
            shown = logits.float()[None].to(choice.ids.device)
            scores = processor(choice.ids[:, :place], shown)
            found.append(int(scores.argmax()) == int(choice.ids[0, place]))
    return found
