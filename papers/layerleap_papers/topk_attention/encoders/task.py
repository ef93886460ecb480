"""A classification task: rows of symbols with their classes, to train on and to test on.

In: sequences of symbols. Out: `Task`, the form that all tasks share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.short_repr import ShortRepr

PAD, START = 0, 1  # symbols of every task; the others begin at 2


@dataclass(frozen=True, repr=False)
class Rows(ShortRepr):
    """Sequences padded on the right with `PAD`; each begins with `START`."""

    ids: Tensor  # (row, pos)
    labels: Tensor  # (row,)

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], labels: Sequence[int]) -> "Rows":
        """Rows of these sequences, which count their symbols from 0."""
        ids = [torch.tensor([START, *(2 + symbol for symbol in one)]) for one in sequences]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
        return cls(padded, torch.tensor(labels))

    @property
    def lengths(self) -> Tensor:
        """How many positions each sequence has: (row,)."""
        return (self.ids != PAD).sum(1)

    def inputs(self, rows: Tensor) -> dict[str, Tensor]:
        """What a model takes for some rows, without needless padding."""
        ids = self.ids[rows]
        ids = ids[:, : int((ids != PAD).sum(1).max())]
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


@dataclass(frozen=True, repr=False)
class Task(ShortRepr):
    """One task. No held-out sequence is among the fitted ones."""

    name: str
    symbols: int  # padding and start included
    classes: int
    fitted: Rows
    held_out: Rows

    @property
    def longest(self) -> int:
        """How many positions the longest sequence has."""
        return max(self.fitted.ids.shape[1], self.held_out.ids.shape[1])

    @property
    def chance(self) -> float:
        """Held-out accuracy of always giving the class that is most frequent in training."""
        usual = self.fitted.labels.bincount().argmax()
        return float((self.held_out.labels == usual).double().mean())
