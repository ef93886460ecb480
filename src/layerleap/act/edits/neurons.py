"""Edits of one neuron: its coefficient at chosen positions.

In: a block, the number of one of its neurons, positions, and what becomes of the coefficient.
Out: edits for `model.edit`. A coefficient is what multiplies the neuron's value vector in the sum
that the FFN gives (`models.weights`), so changing it by c adds c times that vector.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.lens.vocabulary.index import known_range
from layerleap.lens.vocabulary.ranges import Range
from layerleap.models.facts import check_number
from layerleap.models.hooks.edit import Change, Edit
from layerleap.models.hooks.rows import Positions, Rows, check_positions
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward


@dataclass(frozen=True)
class NeuronEdit(Edit):
    """A change of one coefficient; see the subclasses."""

    block: int  # 1 to n_layers
    neuron: int  # 0 to n_neurons - 1
    # "all", "last", "generated", or numbers counted from the first token of each text.
    positions: Positions = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", check_positions(self.positions))
        for name, value in self._numbers().items():
            if not isinstance(value, Real) or not math.isfinite(value):
                raise BadSettings(f"{name} is {value!r}; expected a finite number")

    def _numbers(self) -> dict[str, Any]:
        """What the coefficient is changed by, by field."""
        own = {"block", "neuron", "positions"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}

    @abstractmethod
    def _new(self, coefficients: Tensor) -> Tensor:
        """The coefficients after the edit: (position,)."""

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the input of the block's down-projection."""
        ffn = feed_forward(transformer, self.block)
        check_number("neuron", self.neuron, 0, ffn.n_neurons - 1, f"block {self.block}")
        dtype = ffn.values(transformer).dtype
        for name, value in self._numbers().items():
            if abs(value) > (most := torch.finfo(dtype).max):
                raise BadSettings(
                    f"{name} is {value:g}; the largest number of this model's dtype is {most:g}"
                )
        return [Change(self.block, ffn.module(transformer), "in", self._apply)]

    def remark(self, transformer: Transformer) -> str:
        """How far outside its natural range the coefficient goes, if a cached index knows it."""
        known = known_range(transformer, self.block, self.neuron)
        return "" if known is None else known.outside(self._farthest(known))

    @abstractmethod
    def _farthest(self, known: Range) -> float:
        """The value farthest from a range that the coefficient takes if it was inside before."""

    def _apply(self, values: Tensor, rows: Callable[[], Rows]) -> tuple[Tensor, int]:
        at = rows().select(self.positions).nonzero()[:, 0].to(values.device)
        if not len(at):
            return values, 0
        neuron = torch.full_like(at, self.neuron)
        return values.index_put((at, neuron), self._new(values[at, neuron])), len(at)


@dataclass(frozen=True)
class SetNeuron(NeuronEdit):
    """Set a coefficient to `value`.

    with model.edit(ll.edits.SetNeuron(block=3, neuron=17, value=8.0, positions="last")):
        ...
    """

    value: float

    def _farthest(self, known: Range) -> float:
        return float(self.value)

    def _new(self, coefficients: Tensor) -> Tensor:
        return torch.full_like(coefficients, self.value)


@dataclass(frozen=True)
class ScaleNeuron(NeuronEdit):
    """Multiply a coefficient by `factor`.

    with model.edit(ll.edits.ScaleNeuron(block=3, neuron=17, factor=-1.0)):
        ...
    """

    factor: float

    def _farthest(self, known: Range) -> float:
        ends = (known.low * self.factor, known.high * self.factor)
        return float(max(ends, key=lambda value: max(known.low - value, value - known.high)))

    def _new(self, coefficients: Tensor) -> Tensor:
        return coefficients * self.factor


@dataclass(frozen=True)
class AddNeuron(NeuronEdit):
    """Add `amount` to a coefficient: `amount` times the value vector is added to the stream.

    with model.edit(ll.edits.AddNeuron(3, 17, 5.0, positions="generated")):
        ...
    """

    amount: float

    def _farthest(self, known: Range) -> float:
        return float((known.high if self.amount > 0 else known.low) + self.amount)

    def _new(self, coefficients: Tensor) -> Tensor:
        return coefficients + self.amount


@dataclass(frozen=True)
class ZeroNeuron(NeuronEdit):
    """Switch a neuron off.

    with model.edit(ll.edits.ZeroNeuron(block=3, neuron=17), ll.edits.ZeroNeuron(4, 2)):
        ...
    """

    def _farthest(self, known: Range) -> float:
        return known.mean  # switching a neuron off is never too strong

    def _new(self, coefficients: Tensor) -> Tensor:
        return torch.zeros_like(coefficients)
