"""Runs the trials of an intervention: what recipients read as with another state patched in.

In: a model, a lens, pairs and trials, and the batches that hold the recipients.
Out: for every trial whether the recipient still ends with its top token, and where it saturates.
Blocks below a patch run once per batch; recipients run side by side, many trials of each at a time.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from layerleap import Lens, Transformer
from layerleap.act.edits import PatchState, run_patched
from layerleap.act.exits import Evidence
from layerleap.errors import BadSettings
from layerleap.lens import States, chunks
from layerleap.models import Recording, record
from layerleap.stream import Batch
from layerleap_papers.beyond_the_top1.donors import KINDS, Pairs, Trials


class Runner:
    """Runs trials, batch by batch, and records which of them read as the right token.

    `reads` and `stays`, (trial,): the state patched in reads as that token; and so does every layer
    after it. `identical`: recipients given their own state run on bit-identically. `moved`:
    recipients that, unpatched, end with another token than before, by rounding.
    """

    def __init__(
        self,
        transformer: Transformer,
        lens: Lens,
        pairs: Pairs,
        trials: Trials,
        states: States,
        *,
        tokens: int = 1024,
        seed: int = 0,
    ) -> None:
        self.transformer, self.lens, self.states, self.tokens = transformer, lens, states, tokens
        self.pairs, self.trials, self.seed = pairs, trials, seed
        self.reads = torch.zeros(len(trials.pair), dtype=torch.bool)
        self.stays = torch.zeros(len(trials.pair), dtype=torch.bool)
        self.identical, self.moved = True, 0

    @torch.no_grad()
    def run(self, batch: Batch, chosen: Tensor, first_row: int) -> None:
        """All trials of the pairs `chosen`, whose recipients are rows of this batch."""
        if self.transformer.row_kind != "position":
            raise BadSettings(
                f"the head of {self.transformer.identity.name} pools positions, so no single "
                "position can be patched to change its answer"
            )
        place = batch.keep.nonzero()[self.pairs.recipient[chosen] - first_row]  # (pair, 2)
        texts, slot = place[:, 0].unique(return_inverse=True)
        position = torch.empty(len(self.pairs.donor), dtype=torch.int64)
        position[chosen] = place[:, 1]
        text_of = torch.full((len(self.pairs.donor),), -1)
        text_of[chosen] = slot
        text = text_of[self.trials.pair]  # of each trial, by number in this run; -1: of no text
        width = batch.keep.shape[1]
        if self.transformer.kind == "next-token":
            width = int(place[:, 1].max()) + 1  # later positions cannot change a causal state
        queues = [self._queue(text, no_ops) for no_ops in (False, True)]
        most = 1 + max(int(turn.max()) for _, turn in queues)
        copies = max(1, min(most, self.tokens // (len(texts) * width)))
        rows, n = texts.repeat(copies), len(batch.keep)
        repeated = {name: _rows(value, rows, n) for name, value in batch.cut(width).items()}
        recording = record(self.transformer, repeated)
        last = recording.states[-1][slot, place[:, 1]]
        ends = self._tokens(last, self.transformer.n_layers)
        self.moved += int((ends != self.pairs.token[chosen]).sum())
        for trials, turn in queues:
            for start in range(0, int(turn.max()) + 1, copies):
                here = (start <= turn) & (turn < start + copies)
                now = trials[here]
                slots = (turn[here] - start) * len(texts) + text[now]  # of a copy of its text
                self._round(recording, slots, now, position[self.trials.pair[now]])

    def _queue(self, text: Tensor, no_ops: bool) -> tuple[Tensor, Tensor]:
        """Trials, low layers first, and the turn of each among those of its text.

        No-ops never run beside others: where rows meet in one product, as they do in
        experts, a change in another text can show in the last bit.
        """
        is_own = self.trials.kind == KINDS.index("no-op")
        trials = ((text >= 0) & (is_own == no_ops)).nonzero()[:, 0]
        trials = trials[self.trials.layer[trials].argsort(stable=True)]
        turns = torch.nn.functional.one_hot(text[trials]).cumsum(0) - 1  # (trial, text)
        return trials, turns.gather(1, text[trials, None])[:, 0]

    def _round(self, recording: Recording, slots: Tensor, trials: Tensor, at: Tensor) -> None:
        """One trial in each of some slots of the batch, all layers in one run."""
        layer, h_in = self.trials.layer[trials], self._patches(recording, slots, trials, at)
        patches = []
        for value in layer.unique().tolist():
            here = layer == value
            patches.append(PatchState(value, h_in[here], at[here], slots[here]))
        is_no_op = self.trials.kind[trials] == KINDS.index("no-op")
        rows = {}
        for current, h in run_patched(recording, patches):
            place = (slots.to(h.device), at.to(h.device))
            rows[current] = h[place]
            self.identical &= torch.equal(
                rows[current][is_no_op], recording.states[current][place][is_no_op]
            )
        self._judge(rows, trials)

    def _judge(self, rows: Mapping[int, Tensor], trials: Tensor) -> None:
        """Which trials read as the right token, from the last layer down to the patch.

        A trial is not read again once it reads as another token: the head is the expensive part.
        """
        layer, token = self.trials.layer[trials], self.pairs.token[self.trials.pair[trials]]
        right = torch.ones(len(trials), dtype=torch.bool)
        for current in sorted(rows, reverse=True):
            begun = layer <= current
            unread = (begun & right | (layer == current)).nonzero()[:, 0]
            agrees = self._tokens(rows[current][unread], current) == token[unread]
            self.reads[trials[unread]] = agrees  # the last to be written is the patch's own layer
            right[unread] &= agrees
        self.stays[trials] = right

    def _patches(self, recording: Recording, slots: Tensor, trials: Tensor, at: Tensor) -> Tensor:
        """The states that are patched in: (trial, d_model)."""
        kind, layer = self.trials.kind[trials], self.trials.layer[trials]
        states = self.states.cells(self.trials.source[trials], layer)
        for number in (kind == KINDS.index("random")).nonzero()[:, 0].tolist():
            seed = self.seed * 1_000_003 + int(trials[number])  # the same in any batch
            noise = torch.randn(states.shape[1], generator=torch.Generator().manual_seed(seed))
            states[number] = noise * (states[number].norm() / noise.norm())
        # The recipient's own state comes from this run: rows were saved as float32.
        states = states.to(recording.states[0].dtype)
        for number in (kind == KINDS.index("no-op")).nonzero()[:, 0].tolist():
            h = recording.states[int(layer[number])]
            states[number] = h[int(slots[number]), int(at[number])].cpu()
        return states

    def _tokens(self, rows: Tensor, layer: int) -> Tensor:
        """What rows of h[layer] read as; of equal logits, the lowest id."""
        parts = [
            self.lens.logits(rows[part], layer).max(-1).indices.cpu()
            for part in chunks(len(rows), self.transformer.d_vocab)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def success(self, evidence: Evidence) -> Tensor:
        """Which trials end with the recipient's token and saturate at the patch: (trial,)."""
        trials = self.trials  # evidence says what unpatched recipients read as
        before = evidence.top[self.pairs.recipient[trials.pair], trials.layer - 1]
        return self.stays & (before != self.pairs.token[trials.pair])


def _rows(value: Any, texts: Tensor, n: int) -> Any:
    """Some rows of an input, one or several times; it may be the output of an encoder."""
    if isinstance(value, Tensor):
        return value[texts.to(value.device)] if value.dim() and len(value) == n else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _rows(part, texts, n) for name, part in value.items()})
    return value
