"""Edits along a vector of the stream: added, projected out, or its coordinate clamped.

In: a layer, a vector or a `Direction` (`ll.direction`), and positions. Out: edits for `model.edit`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from layerleap.act.edits.places import RowEdit, state_place
from layerleap.act.steering.saved import Direction
from layerleap.errors import BadSettings
from layerleap.models.hooks.edit import Change
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class VectorEdit(RowEdit):
    """A change of h[layer] along a vector; see the subclasses."""

    layer: int  # 0 to n_layers
    vector: Tensor | Direction

    def __post_init__(self) -> None:
        super().__post_init__()
        vector = self._vector
        if vector.dim() != 1 or not torch.isfinite(vector).all() or not vector.any():
            raise BadSettings(
                f"a vector of {tuple(vector.shape)}; expected (d_model,) finite numbers, not all 0"
            )

    @property
    def _vector(self) -> Tensor:
        return self.vector.vector if isinstance(self.vector, Direction) else self.vector

    def __repr__(self) -> str:
        vector = self.vector if isinstance(self.vector, Direction) else f"of {len(self._vector)}"
        return (
            f"{type(self).__name__}(layer={self.layer}, {vector!s}, positions={self.positions!r})"
        )

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the output of the block that makes h[layer]; h[0] is what the first block takes."""
        if isinstance(self.vector, Direction):
            self.vector.check_model(transformer)
        if len(self._vector) != transformer.d_model:
            raise BadSettings(
                f"a vector of width {len(self._vector)} cannot be used in this model; expected "
                f"its width, {transformer.d_model}"
            )
        return [Change(*state_place(transformer, self.layer), self._at_positions(self._new))]

    def _along(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The coordinate of each row along the vector, (row, 1), and the vector at length 1."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        unit = self._vector.to(rows.device, wide)
        unit = unit / unit.norm()
        return (rows.to(wide) @ unit)[:, None], unit

    @abstractmethod
    def _new(self, rows: Tensor) -> Tensor:
        """What becomes of the rows."""


@dataclass(frozen=True, eq=False, repr=False)
class AddVector(VectorEdit):
    """Add `factor` times a vector to h[layer]: steering.

    With unit="state" the vector is first given the mean length of the states of h[layer], so that
    a factor means the same at every layer; only a `Direction` knows that length, from the prompts
    that it was found with.

        with model.edit(ll.edits.AddVector(15, direction, 2.0)):
            print(ll.generate(model, "I think that"))
    """

    factor: float = 1.0
    unit: Literal["vector", "state"] = "vector"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit == "state" and not isinstance(self.vector, Direction):
            raise BadSettings("unit='state' needs a Direction, which knows how long states are")

    def _new(self, rows: Tensor) -> Tensor:
        factor = self.factor
        if self.unit == "state" and isinstance(self.vector, Direction):
            factor = factor * self.vector.state_length(self.layer) / float(self._vector.norm())
        wide = torch.promote_types(rows.dtype, torch.float32)
        return rows + (factor * self._vector.to(rows.device, wide)).to(rows.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class ProjectOut(VectorEdit):
    """Take out of h[layer] what lies along a vector.

    with model.edit(*(ll.edits.ProjectOut(layer, direction) for layer in range(10, 21))):
        ...
    """

    def _new(self, rows: Tensor) -> Tensor:
        coordinate, unit = self._along(rows)
        return rows - (coordinate * unit).to(rows.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class ClampAlong(VectorEdit):
    """Keep the coordinate of h[layer] along a vector between `low` and `high`.

    Coordinates are inner products with the vector at length 1; a `Direction` says in `ends` which
    ones its two sets of prompts have on average, the negative set first.

        with model.edit(ll.edits.ClampAlong(15, direction, high=direction.ends[0])):
            ...
    """

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise BadSettings("neither low nor high is given; expected one of them, or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise BadSettings(f"low is {self.low} and high is {self.high}; expected low <= high")

    def _new(self, rows: Tensor) -> Tensor:
        coordinate, unit = self._along(rows)
        change = coordinate.clamp(self.low, self.high) - coordinate
        return rows + (change * unit).to(rows.dtype)
