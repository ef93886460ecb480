"""Runs the trials of an intervention: what recipients read as with another state patched in.

In: a model, a lens, pairs and trials, and the batches that hold the recipients.
Out: `Outcome`: for every trial whether the recipient still ends with its top token, and where it
saturates. Blocks below a patch run once per batch; recipients run side by side, many trials of each
at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from layerleap.act.edits.patch import PatchState, run_patched
from layerleap.act.exits.evidence import Evidence
from layerleap.models.hooks.recording import Recording, record
from layerleap.models.transformer import Transformer
from layerleap.read.lens import Lens, chunks
from layerleap.read.probes.task import States
from layerleap.stream.examples import Batch
from layerleap.study.saturation.donors import KINDS, Pairs, Trials


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of each trial: (trial,)."""

    trials: Trials
    success: Tensor  # ends with its own top token, and saturates at the layer of the patch
    reads: Tensor  # the state patched in reads as that token
    stays: Tensor  # and so does every layer after it
    identical: bool  # recipients given their own state run on bit-identically
    moved: int  # recipients that, unpatched, end with another token than before: by rounding


class Runner:
    """Runs trials, batch by batch, and records which of them read as the right token."""

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
        """A runner that has not run anything.

        Args:
            transformer: the model.
            lens: through which states are read.
            pairs: donors and recipients.
            trials: what is patched into the recipients.
            states: of all rows.
            tokens: how many run side by side.
            seed: of random states.
        """
        self.transformer, self.lens, self.states, self.tokens = transformer, lens, states, tokens
        self.pairs, self.trials, self.seed = pairs, trials, seed
        self.reads = torch.zeros(len(trials), dtype=torch.bool)
        self.stays = torch.zeros(len(trials), dtype=torch.bool)
        self.identical, self.moved = True, 0

    @torch.no_grad()
    def run(self, batch: Batch, chosen: Tensor, first_row: int) -> None:
        """All trials of the pairs `chosen`, whose recipients are rows of this batch."""
        place = batch.keep.nonzero()[self.pairs.recipient[chosen] - first_row]  # (pair, 2)
        texts, slot = place[:, 0].unique(return_inverse=True)
        position = torch.empty(len(self.pairs), dtype=torch.int64)
        position[chosen] = place[:, 1]
        slots = torch.full((len(self.pairs),), -1)
        slots[chosen] = slot
        width = batch.keep.shape[1]
        if self.transformer.kind == "next-token":
            width = int(place[:, 1].max()) + 1  # later positions cannot change a causal state
        queues = self._queues(slots, len(texts))
        most = max(len(queue) for part in queues for queue in part)
        copies = max(1, min(most, self.tokens // (len(texts) * width)))
        recording = record(self.transformer, _repeated(batch, texts.repeat(copies), width))
        last = recording.states[-1][slot, place[:, 1]]
        ends = self._tokens(last, self.transformer.n_layers)
        self.moved += int((ends != self.pairs.token[chosen]).sum())
        for part in queues:
            for slots, trials in _rounds(part, copies):
                self._round(recording, slots, trials, position[self.trials.pair[trials]])

    def _queues(self, slots: Tensor, n_texts: int) -> tuple[list[list[int]], list[list[int]]]:
        """The trials of each text, low layers first; no-ops separately.

        No-ops never run beside others: where rows meet in one product, as they do in experts, a
        change in another text can show in the last bit.
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
        layer, h_in = self.trials.layer[trials], self._patches(recording, slots, trials, at)
        patches = []
        for value in layer.unique().tolist():
            here = layer == value
            patches.append(PatchState(value, h_in[here], at[here], slots[here]))
        own = self.trials.kind[trials] == KINDS.index("no-op")
        rows = {}
        for current, h in run_patched(recording, patches):
            place = (slots.to(h.device), at.to(h.device))
            rows[current] = h[place]
            self.identical &= torch.equal(rows[current][own], recording.states[current][place][own])
        self._judge(rows, trials)

    def _judge(self, rows: Mapping[int, Tensor], trials: Tensor) -> None:
        """Which trials read as the right token, from the last layer down to the patch.

        A trial is not read again once it reads as another token: the head is the expensive part.
        """
        layer, token = self.trials.layer[trials], self.pairs.token[self.trials.pair[trials]]
        right = torch.ones(len(trials), dtype=torch.bool)
        for current in sorted(rows, reverse=True):
            begun = layer <= current
            asked = (begun & right | (layer == current)).nonzero()[:, 0]
            agrees = self._tokens(rows[current][asked], current) == token[asked]
            self.reads[trials[asked]] = agrees  # the last to be written is the patch's own layer
            right[asked] &= agrees
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

    def outcome(self, evidence: Evidence) -> Outcome:
        """The result of every trial; `evidence` says what unpatched recipients read as."""
        trials = self.trials
        before = evidence.top[self.pairs.recipient[trials.pair], trials.layer - 1]
        is_new = before != self.pairs.token[trials.pair]
        return Outcome(
            trials, self.stays & is_new, self.reads, self.stays, self.identical, self.moved
        )


def _rounds(queues: list[list[int]], copies: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Slots of the batch and the trial in each; a text has as many slots as there are copies.

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


def _repeated(batch: Batch, texts: Tensor, width: int) -> dict[str, Any]:
    """The inputs of some texts up to a width; a text may be named several times."""
    n = len(batch.keep)
    return {name: _rows(value, texts, n) for name, value in batch.cut(width).items()}


def _rows(value: Any, texts: Tensor, n: int) -> Any:
    """Some rows of an input, which may be the output of an encoder."""
    if isinstance(value, Tensor):
        return value[texts.to(value.device)] if value.dim() and len(value) == n else value
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _rows(part, texts, n) for name, part in value.items()})
    return value
