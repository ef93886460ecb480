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

import torch
from torch import Tensor

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.sampling import Processor, TokenChooser
from layerleap.act.decode.shortlist import Shortlist
from layerleap.act.exits.evidence import COLUMNS, LiveEvidence
from layerleap.act.exits.rules import Rule
from layerleap.act.spelling import Policy
from layerleap.lens.lens import Lens, chunks
from layerleap.lens.metrics import Distribution
from layerleap.models.cursor.cursor import Carry, Cursor

# Columns that a rule of the state alone does not use, for one row and one layer.
_UNKNOWN, _NO_TOKEN = torch.full((1, 1), torch.nan), torch.full((1, 1), -1)
_FIRST = torch.zeros(1, dtype=torch.long)


class LiveChecks:
    """Evidence of one position on its way through the layers: a column for every layer checked.

    The numbers are those that a finished pass gives. Only what the rule needs is computed: a
    reading costs a head, a cosine next to nothing. With a shortlist, readings are restricted to it.
    """

    def __init__(
        self, lens: Lens, rule: Rule, position: int, shortlist: Shortlist | None = None
    ) -> None:
        self.lens, self.rule, self.position, self.shortlist = lens, rule, position, shortlist
        self.extra = getattr(rule, "live_extra", None) or {}
        self.layers: list[int] = []
        self.logits: Tensor | None = None  # at the last layer checked, if computed
        self._columns: dict[str, list[Tensor]] = {}

    def __call__(self, layer: int, before: Tensor, h: Tensor) -> bool:
        """Check h[layer] of one row; True if the rule stops there."""
        if self.rule.needs == "state":
            return self._check_state(layer, before, h)
        self.layers.append(layer)
        self.logits = None
        values = dict.fromkeys((*COLUMNS, "size"), _UNKNOWN[0]) | {"top": _NO_TOKEN[0]}
        if self.rule.needs == "reading":
            values["cosine"] = torch.cosine_similarity(before.float(), h.float()).cpu()
            state = self.lens.map(layer)(h)
            values["size"] = state.float().norm(dim=-1).clamp_min(1e-30).log().cpu()
            values |= self._read(state)
        # As precise as in a replay.
        values |= {name: compute(h, layer).cpu() for name, compute in self.extra.items()}
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)
        columns = {name: torch.stack(column, 1) for name, column in self._columns.items()}
        evidence = LiveEvidence(
            **{name: columns.pop(name) for name in COLUMNS},
            position=torch.tensor([self.position]),
            document=_FIRST,
            layers=tuple(self.layers),
            extra=columns,
        )
        return bool(self.rule.stops(evidence)[0, -1])

    def _check_state(self, layer: int, before: Tensor, h: Tensor) -> bool:
        """The same for a rule of the state alone, which needs no other layer.

        It does as little as possible: in a small model a check of a tenth of a millisecond costs
        what one skipped layer saves.
        """
        extra = {name: compute(h, layer).cpu()[:, None] for name, compute in self.extra.items()}
        cosine = _UNKNOWN
        if not extra:
            cosine = torch.cosine_similarity(before.float(), h.float()).cpu()[:, None]
        evidence = LiveEvidence(
            _NO_TOKEN, _UNKNOWN, _UNKNOWN, _UNKNOWN, cosine, _FIRST, _FIRST, (layer,), extra=extra
        )
        return bool(self.rule.stops(evidence)[0, 0])

    def _read(self, state: Tensor) -> dict[str, Tensor]:
        transformer, shortlist = self.lens.transformer, self.shortlist
        self.logits = (transformer if shortlist is None else shortlist).logits(state)
        reading = Distribution(self.logits)
        top = reading.top.cpu()
        return {
            "top": top if shortlist is None else shortlist.ids[top.long()],
            "top_prob": reading.top_prob.cpu(),
            "second_prob": reading.second().cpu(),
            "entropy": reading.entropy.cpu(),
        }

    def exit_logits(self, h: Tensor, layer: int, shortlist: Shortlist | None) -> Tensor:
        """Logits of all tokens where the position exits; -inf outside `shortlist`, if given."""
        if layer == self.lens.transformer.n_layers:
            return self.lens.transformer.logits(h)[0]
        logits = self.logits if shortlist is self.shortlist else None  # else it is read again
        if shortlist is None:
            return (self.lens.logits(h, layer) if logits is None else logits)[0]
        logits = shortlist.logits(self.lens.map(layer)(h)) if logits is None else logits
        return shortlist.expand(logits)[0]


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
    stats: DecodingStats,
    lens: Lens,
    rule: Rule,
    *,
    checks: Sequence[int],
    policy: Policy = "recompute",
    shortlist: Shortlist | None = None,
    reads_shortlist: bool = False,
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Generate until the chooser is finished, or `until`, called before each pass, returns True.

    The cursor is inside its `with`; the text has begun, and its prompt ran through all layers. The
    rule is checked at the layers `checks`, on readings of the shortlist if there is one; with
    `reads_shortlist`, tokens that exit early are chosen from it, too.
    """
    carry, listed = carry_of(policy, lens), shortlist if reads_shortlist else None
    while not chooser.is_finished and not until():
        live = LiveChecks(lens, rule, cursor.length, shortlist)
        ran = cursor.run(chooser.chosen[-1:], watch=live, checks=checks, carry=carry)
        stats.current_layer = ran.layer
        read = partial(live.exit_logits, ran.h[-1:], ran.layer)
        chooser(read(listed), None if listed is None else partial(read, None))
        stats.record_pass(tokens=1, layer=ran.layer)
    if cursor.waiting and chooser.is_finished:
        cursor.run([])  # completes the cache for its next user
        stats.record_end()


@torch.no_grad()
def full_choices(writer: Cursor, chooser: TokenChooser, processor: Processor) -> list[int]:
    """For each chosen token: what the full model chooses after the same text.

    Edits in force apply here as they did when `writer` wrote the text. The processor is a copy from
    before the text; some processors remember what they have seen.
    """
    transformer = writer.transformer
    with Cursor(transformer, writer.axes, text=writer.text, prompt=writer.prompt) as cursor:
        h = cursor.run(chooser.text[:-1]).h[-len(chooser.chosen) :]
    choices: list[int] = []
    for rows in chunks(len(h), transformer.d_vocab):
        for logits in transformer.logits(h[rows]):
            place = chooser.ids.shape[1] - len(chooser.chosen) + len(choices)
            scores = processor(chooser.ids[:, :place], logits.float()[None].to(chooser.ids.device))
            choices.append(int(scores.argmax()))
    return choices
