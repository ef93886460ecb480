"""Edits of one attention head: what it gives, before the output matrix, at chosen positions.

In: a block, the number of one of its heads, and positions. Out: edits for `model.edit`. What a head
gives is a sum of value vectors weighted by its attention; the output matrix carries it into the
stream (`models.weights.heads`).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.act.edits.places import RowEdit, head_place
from layerleap.errors import BadSettings
from layerleap.models.hooks.capture import capture
from layerleap.models.hooks.edit import Change
from layerleap.models.inputs import as_inputs, real_positions
from layerleap.models.transformer import Transformer

# What heads give on average is measured here by default: plain sentences on unlike matters.
NEUTRAL = (
    "The town hall was built in 1887 and stands at the corner of the market square.",
    "Water boils at a lower temperature in the mountains because the air pressure is lower.",
    "She put the letter back into the drawer, locked it, and went down to the kitchen.",
    "To install the program, unpack the archive and run the script in the first folder.",
    "The committee will meet again on Thursday to decide about the budget for next year.",
    "Most of these birds spend the winter in the south and return at the end of March.",
)


@dataclass(frozen=True)
class HeadEdit(RowEdit):
    """A change of what one head gives; see the subclasses."""

    block: int  # 1 to n_layers
    head: int  # from 0

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the input of the output matrix of attention."""
        module, columns = head_place(transformer, self.block, self.head)
        new = self._new(transformer, columns)

        def changed(rows: Tensor) -> Tensor:
            rows = rows.clone()
            rows[:, columns] = new(rows[:, columns])
            return rows

        return [Change(self.block, module, "in", self._at_positions(changed))]

    @abstractmethod
    def _new(self, transformer: Transformer, columns: slice) -> Callable[[Tensor], Tensor]:
        """What becomes of the rows of the head, (position, width of a head)."""


@dataclass(frozen=True)
class ZeroHead(HeadEdit):
    """Switch a head off.

    with model.edit(ll.edits.ZeroHead(block=12, head=3)):
        ...
    """

    def _new(self, transformer: Transformer, columns: slice) -> Callable[[Tensor], Tensor]:
        return torch.zeros_like


@dataclass(frozen=True)
class ScaleHead(HeadEdit):
    """Multiply what a head gives by `factor`.

    with model.edit(ll.edits.ScaleHead(12, 3, factor=2.0)):
        ...
    """

    factor: float

    def _new(self, transformer: Transformer, columns: slice) -> Callable[[Tensor], Tensor]:
        return lambda rows: rows * self.factor


@dataclass(frozen=True, eq=False)
class SetHead(HeadEdit):
    """Set what a head gives to one vector.

    with model.edit(ll.edits.SetHead(12, 3, torch.zeros(64), positions="last")):
        ...
    """

    value: Tensor  # (width of a head,)

    def _new(self, transformer: Transformer, columns: slice) -> Callable[[Tensor], Tensor]:
        width = columns.stop - columns.start
        if tuple(self.value.shape) != (width,) or not torch.isfinite(self.value).all():
            raise BadSettings(
                f"value of {tuple(self.value.shape)} for head {self.head} of block {self.block}; "
                f"expected {width} finite numbers"
            )
        return lambda rows: self.value.to(rows.device, rows.dtype).expand_as(rows)


@dataclass(frozen=True, eq=False)
class MeanHead(HeadEdit):
    """Set what a head gives to its mean over all positions of some prompts.

    Unlike switching it off, this keeps what the head adds whatever the text. The mean is taken
    when the edit is applied, without other edits. By default it is over all tokens of six plain
    sentences, the first ones included; `ll.attribute(..., total=True)` takes its means over the
    model's default text, without the first token of each text.

        with model.edit(ll.edits.MeanHead(12, 3, over=["Paris is in France.", "I like tea."])):
            ...
    """

    over: Any = NEUTRAL  # prompts

    def __repr__(self) -> str:
        over = "" if self.over is NEUTRAL else ", over=..."
        return f"MeanHead(block={self.block}, head={self.head}, positions={self.positions!r}{over})"

    def _new(self, transformer: Transformer, columns: slice) -> Callable[[Tensor], Tensor]:
        given = list(self.over) if self.over is NEUTRAL else self.over
        inputs = as_inputs(transformer, given)
        captured = capture(transformer, inputs, layers=[], heads=[self.block])
        gives = captured.heads[self.block][:, :, self.head]
        real = real_positions(transformer, inputs, gives.shape)
        mean = gives[real.to(gives.device)].double().mean(0)
        return lambda rows: mean.to(rows.device, rows.dtype).expand_as(rows)
