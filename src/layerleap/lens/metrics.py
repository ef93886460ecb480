"""Metrics that compare a reading with the model's output, one value per row.

In: logits of the model and of a reading, (row, d_vocab). Out: numbers per row, nothing V-sized;
`intervals` turns them into means with intervals.

Definitions follow "Jump to Conclusions" (arXiv 2303.09435), section 4:
    Precision@k   the reading's top token is among the model's top k
    Surprisal     -ln p_model(the reading's top token), nats; at the last layer -ln p_max, not 0
    KL            KL(model || reading), nats
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.short_repr import ShortRepr

DEPTH = 10  # Precision@k is known for k up to this


@dataclass(frozen=True, repr=False)
class Comparison(ShortRepr):
    """A reading compared with the model, per row, and the reading's own confidence."""

    top: Tensor  # the reading's top token
    rank: Tensor  # its rank in the model's output, 0 = first; DEPTH means DEPTH or lower
    surprisal: Tensor
    kl: Tensor
    top_prob: Tensor  # the reading's probability of its top token
    second_prob: Tensor  # and of its second token
    entropy: Tensor  # of the reading, nats


class Distribution:
    """Logits as probabilities, with a few statistics per row: (row, d_vocab) -> (row,)."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits.float()
        self.p = self.logits.softmax(-1)
        # Of equal logits, torch returns the lowest id.
        highest, self.top = self.logits.max(-1)
        self.top_prob = self.p.gather(-1, self.top[:, None])[:, 0]
        self.log_norm = highest - self.top_prob.log()  # cheaper than a pass for logsumexp
        self.entropy = self.log_norm - torch.linalg.vecdot(self.p, self.logits)

    def second(self) -> Tensor:
        """The probability of the second token. Call it last: it overwrites `p`."""
        return self.p.scatter_(-1, self.top[:, None], 0.0).amax(-1)


class Reference(Distribution):
    """The model's own distribution for a few rows, ready to compare readings with."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits)
        self.best = self.logits.topk(min(DEPTH + 1, logits.shape[-1])).values

    def compare(self, reading: Tensor) -> Comparison:
        """How the logits `reading` (row, d_vocab) differ from the model's.

        A reference of one row is compared with each row of the reading.
        """
        read = Distribution(reading)
        chosen = self.logits.expand_as(reading).gather(-1, read.top[:, None])
        cross = read.log_norm - torch.linalg.vecdot(self.p, read.logits)
        # Clamped because rounding can push a divergence of zero slightly below zero.
        kl = (cross - self.entropy).clamp_min(0)
        rank, surprisal = self._rank(chosen, read.top), self.log_norm - chosen[:, 0]
        confidence = read.top_prob, read.second(), read.entropy
        return Comparison(read.top, rank, surprisal, kl, *confidence)

    def _rank(self, chosen: Tensor, top: Tensor) -> Tensor:
        rank = (self.best > chosen).sum(-1).clamp_max(DEPTH)
        tied = ((self.best == chosen).sum(-1) > 1).nonzero()[:, 0]
        for row in tied.tolist():  # rare: equal logits are ordered by id, like the top token
            logits = self.logits[row if len(self.logits) > 1 else 0]
            before = logits[: int(top[row])] == chosen[row]
            rank[row] = min(DEPTH, int(rank[row] + before.sum()))
        return rank


def lasting(shares: Sequence[float | None], least: float) -> int | None:
    """The first layer from which on no value is below `least`; a passing peak does not count."""
    below = [layer for layer, share in enumerate(shares) if share is None or share < least]
    first = below[-1] + 1 if below else 0
    return first if first < len(shares) else None
