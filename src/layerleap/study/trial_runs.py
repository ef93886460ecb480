"""Trials of an intervention, run: what recipients read as once another state is in their stream.

In: a model, a lens, pairs and trials, and the batches that hold the recipients.
Out: `Outcome`: for every trial whether the recipient still ends with its top token, and where it
settles. Blocks below an injection run once per batch; recipients run side by side, many trials of
each at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.act.inject import Injection, run_injected
from layerleap.act.task_probe import States
from layerleap.models.rerun import Recording, record
from layerleap.models.transformer import Transformer
from layerleap.read.lens import Lens, chunks
from layerleap.read.saturation import Saturation, saturation_layers
from layerleap.stream.examples import Batch
from layerleap.study.donors import KINDS, Pairs, Trials


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of each trial: (trial,)."""

    trials: Trials
    success: Tensor  # ends with its own top token, and settles at the layer of the injection
    reads: Tensor  # the state put in reads as that token
    stays: Tensor  # and so does every layer after it
    identical: bool  # recipients that got their own state went on as they had, to the bit
    moved: int  # recipients that settle elsewhere than in the pass that was given, by rounding


class Runner:
    """Runs trials, batch by batch, and keeps what every layer from the injection on reads as."""

    def __init__(
        self,
        transformer: Transformer,
        lens: Lens,
        pairs: Pairs,
        trials: Trials,
        states: States,
        tokens: int,
        seed: int,
    ) -> None:
        self.transformer, self.lens, self.states, self.tokens = transformer, lens, states, tokens
        self.pairs, self.trials = pairs, trials
        self.seed = seed
        last = transformer.n_layers + 1
        self.own = torch.full((len(pairs), last), -1)  # tokens read in recipients as they are
        self.top = torch.full((len(trials), last), -1)  # and with the state put in, from there on
        self.identical = True

    @torch.no_grad()
    def run(self, batch: Batch, chosen: Tensor, first_row: int) -> None:
        """All trials of the pairs `chosen`, whose recipients are rows of this batch."""
        place = batch.keep.nonzero()[self.pairs.recipient[chosen] - first_row]  # (pair, 2)
        texts, slot = place[:, 0].unique(return_inverse=True)
        position = torch.empty(len(self.pairs), dtype=torch.int64)
        position[chosen] = place[:, 1]
        slots = torch.full((len(self.pairs),), -1)
        slots[chosen] = slot
        queues = self._queues(slots, len(texts))
        most = max(len(queue) for part in queues for queue in part)
        copies = max(1, min(most, self.tokens // max(1, len(texts) * batch.keep.shape[1])))
        recording = record(self.transformer, _repeated(batch, texts.repeat(copies)))
        self._read_own(recording, chosen, slot, place[:, 1])
        for part in queues:
            for slots, trials in _rounds(part, copies):
                self._round(recording, slots, trials, position[self.trials.pair[trials]])

    def _queues(self, slots: Tensor, n_texts: int) -> tuple[list[list[int]], list[list[int]]]:
        """The trials of each text, low layers first; no-ops apart.

        No-ops never run beside others: where rows meet in one product, as they do in experts, even
        a change in another text could show in the last bit.
        """
        slot = slots[self.trials.pair]
        numbers = (slot >= 0).nonzero()[:, 0]
        numbers = numbers[self.trials.layer[numbers].argsort(stable=True)]
        queues: tuple[list[list[int]], ...] = tuple([[] for _ in range(n_texts)] for _ in range(2))
        is_own = self.trials.kind == KINDS.index("no-op")
        for number in numbers.tolist():
            queues[int(is_own[number])][int(slot[number])].append(number)
        return queues[0], queues[1]

    def _round(self, recording: Recording, slots: Tensor, trials: Tensor, at: Tensor) -> None:
        """One trial in each of some slots of the batch, all layers in one run."""
        layer, h_in = self.trials.layer[trials], self._put_in(recording, slots, trials, at)
        injections = []
        for value in layer.unique().tolist():
            here = layer == value
            injections.append(Injection(value, h_in[here], slots[here], at[here]))
        own = self.trials.kind[trials] == KINDS.index("no-op")
        for current, h in run_injected(recording, injections):
            begun = layer <= current
            rows = h[slots.to(h.device), at.to(h.device)]
            before = recording.states[current][slots.to(h.device), at.to(h.device)]
            self.identical &= torch.equal(rows[own], before[own])
            self.top[trials[begun], current] = self._tokens(rows[begun], current)

    def _put_in(self, recording: Recording, slots: Tensor, trials: Tensor, at: Tensor) -> Tensor:
        """The states themselves: (trial, d_model)."""
        kind, layer = self.trials.kind[trials], self.trials.layer[trials]
        found = self.states.cells(self.trials.source[trials], layer)
        for number in (kind == KINDS.index("random")).nonzero()[:, 0].tolist():
            seed = self.seed * 1_000_003 + int(trials[number])  # whatever it is run beside
            noise = torch.randn(found.shape[1], generator=torch.Generator().manual_seed(seed))
            found[number] = noise * (found[number].norm() / noise.norm())
        # The recipient's own state is taken from this very run: kept rows are float32.
        dtype = recording.states[0].dtype
        found = found.to(dtype)
        for number in (kind == KINDS.index("no-op")).nonzero()[:, 0].tolist():
            h = recording.states[int(layer[number])]
            found[number] = h[int(slots[number]), int(at[number])].cpu()
        return found

    def _read_own(
        self, recording: Recording, chosen: Tensor, slot: Tensor, position: Tensor
    ) -> None:
        for layer, h in enumerate(recording.states):
            rows = h[slot.to(h.device), position.to(h.device)]
            self.own[chosen, layer] = self._tokens(rows, layer)

    def _tokens(self, rows: Tensor, layer: int) -> Tensor:
        """What rows of h[layer] read as; of equal logits the lowest id, as everywhere."""
        parts = [
            self.lens.logits(rows[part], layer).max(-1).indices.cpu()
            for part in chunks(len(rows), self.transformer.d_vocab)
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def outcome(self, saturation: Saturation) -> Outcome:
        """What became of each trial."""
        trials, layers = self.trials, torch.arange(self.own.shape[1])
        top = torch.where(layers >= trials.layer[:, None], self.top, self.own[trials.pair])
        right = top == self.pairs.token[trials.pair][:, None]
        settled = saturation_layers(top[:, :, None])[:, 0].long()
        ends = right[:, -1]
        own = saturation_layers(self.own[:, :, None])[:, 0].long()
        moved = own != saturation.layer[self.pairs.recipient, 0].long()
        return Outcome(
            trials, ends & (settled == trials.layer),
            right.gather(1, trials.layer[:, None])[:, 0], ends & (settled <= trials.layer),
            self.identical, int(moved.sum()),
        )  # fmt: skip


def _rounds(queues: list[list[int]], copies: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots of the batch, and the trial in each: so many of each text as there are copies of it.

    Copy number c of text t is slot c * n_texts + t.
    """
    for start in range(0, max(map(len, queues)), copies):
        pieces = [
            (copy * len(queues) + text, number)
            for text, queue in enumerate(queues)
            for copy, number in enumerate(queue[start : start + copies])
        ]
        slots, trials = (torch.tensor(column) for column in zip(*pieces, strict=True))
        yield slots, trials


def _repeated(batch: Batch, texts: Tensor) -> dict[str, Any]:
    """The inputs of some texts, each as often as it is named."""
    n = len(batch.keep)
    return {
        name: value[texts.to(value.device)]
        if isinstance(value, Tensor) and value.dim() and len(value) == n
        else value
        for name, value in batch.inputs.items()
    }
