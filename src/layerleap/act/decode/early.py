"""Early-exit decoding: each token runs through as many layers as a rule asks for.

In: a cursor over the model, a token chooser, a lens, a rule. Out: tokens read where the rule stops.

Later tokens need keys and values from the layers that a token skipped. A policy makes them:

    recompute   computed by those layers themselves, together with the next token that gets there:
                keys and values are exact, so exits are those of a replay on the same text
    propagate   computed from the state at the exit, as if the layers above changed nothing
    shortcut    computed from the bank's prediction of the state at each layer above

Under every policy, a token that exits early is read early: the text is an approximation.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.sampling import Processor, TokenChooser
from layerleap.act.decode.shortlist import Shortlist
from layerleap.act.exits.evidence import COLUMNS, Evidence, LiveEvidence
from layerleap.act.exits.rules import Rule
from layerleap.act.spelling import Policy
from layerleap.lens.lens import Lens, chunks
from layerleap.lens.metrics import Distribution
from layerleap.models.cursor.cursor import Carry, Cursor

Extra = Callable[[Tensor, int], Tensor]  # h[layer] and the layer: one number per row

# Columns that a rule of the state alone does not use, for one row and one layer.
_UNKNOWN, _NO_TOKEN = torch.full((1, 1), torch.nan), torch.full((1, 1), -1)
_FIRST = torch.zeros(1, dtype=torch.long)


class LiveChecks:
    """Evidence of one position on its way through the layers: a column for every layer checked.

    The numbers are those that a finished pass gives. Only what the rule needs is computed: a
    reading costs a head, a cosine next to nothing.
    """

    def __init__(
        self,
        lens: Lens,
        rule: Rule,
        position: int,
        *,
        shortlist: Shortlist | None = None,
        extra: Mapping[str, Extra] | None = None,
    ) -> None:
        self.lens, self.rule, self.position, self.shortlist = lens, rule, position, shortlist
        self.extra = extra or {}
        self.layers: list[int] = []
        # At the last layer checked, if computed: logits of all tokens, or of the shortlist.
        self.logits: Tensor | None = None
        self.shortlist_logits: Tensor | None = None
        self._columns: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
        self._extra: dict[str, list[Tensor]] = {name: [] for name in (*self.extra, "size")}

    def __call__(self, layer: int, before: Tensor, h: Tensor) -> bool:
        """Check h[layer] of one row; True if the rule stops there."""
        if self.rule.needs == "state":
            return self._check_state(layer, before, h)
        self.layers.append(layer)
        self.logits = self.shortlist_logits = None
        unknown = torch.full((1,), torch.nan)
        values = dict.fromkeys(COLUMNS, unknown) | {"top": torch.full((1,), -1)}
        size = unknown
        if self.rule.needs == "reading":
            values["cosine"] = torch.cosine_similarity(before.float(), h.float()).cpu()
            state = self.lens.map(layer)(h)
            size = state.float().norm(dim=-1).clamp_min(1e-30).log().cpu()
            values |= self._read(state)
        for name in COLUMNS:
            self._columns[name].append(values[name])
        self._extra["size"].append(size)
        for name, compute in self.extra.items():
            self._extra[name].append(compute(h, layer).cpu())  # as precise as in a replay
        return bool(self.rule.stops(self.evidence())[0, -1])

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
        if self.shortlist is None:
            self.logits = self.lens.transformer.logits(state)
            reading = Distribution(self.logits)
            top = reading.top
        else:
            self.shortlist_logits = self.shortlist.logits(state)
            reading = Distribution(self.shortlist_logits)
            top = self.shortlist.ids[reading.top.cpu().long()]
        return {
            "top": top.cpu(),
            "top_prob": reading.top_prob.cpu(),
            "second_prob": reading.second().cpu(),
            "entropy": reading.entropy.cpu(),
        }

    def evidence(self) -> Evidence:
        """All columns so far."""
        columns = {name: torch.stack(values, 1) for name, values in self._columns.items()}
        extra = {name: torch.stack(values, 1) for name, values in self._extra.items()}
        return LiveEvidence(
            **columns,
            position=torch.tensor([self.position]),
            document=_FIRST,
            layers=tuple(self.layers),
            extra=extra,
        )


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
    until: Callable[[], bool] = lambda: False,
) -> None:
    """Generate until the chooser is finished.

    Args:
        cursor: inside its `with`; its text has begun, and its prompt ran through all layers.
        chooser: the text so far.
        checks_at: from a position to the checks of that position.
        stats: updated after every token.
        lens: reads a state where it exits.
        checks: layers at which the rule is checked.
        policy: how keys and values of skipped layers are made.
        shortlist: the tokens that an early exit chooses from; None reads the whole head.
        until: asked before each pass whether to stop before the text is finished.
    """
    carry = carry_of(policy, lens)
    while not chooser.is_finished and not until():
        live = checks_at(cursor.length)
        ran = cursor.run(chooser.chosen[-1:], watch=live, checks=checks, carry=carry)
        stats.current_layer = ran.layer
        read = partial(_logits, lens, live, ran.h[-1:], ran.layer)
        chooser(read(shortlist), None if shortlist is None else partial(read, None))
        stats.record_pass(tokens=1, layer=ran.layer)
    if cursor.waiting and chooser.is_finished:
        cursor.run([])  # completes the cache for its next user
        stats.record_end()


def _logits(
    lens: Lens, live: LiveChecks, h: Tensor, layer: int, shortlist: Shortlist | None
) -> Tensor:
    if layer == lens.transformer.n_layers:
        return lens.transformer.logits(h)[0]
    if shortlist is not None:
        logits = live.shortlist_logits
        logits = shortlist.logits(lens.map(layer)(h)) if logits is None else logits
        return shortlist.expand(logits)[0]
    if live.logits is not None:
        return live.logits[0]
    return lens.logits(h, layer)[0]


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
