"""Map: what carries a state from one layer to another, whatever its kind.

In: rows of h[src]. Out: rows at layer dst, in the same dtype and on the same device.

A kind of map is a frozen dataclass that derives from `Map`. Its name and title are what tables,
options, figures and the debugger call a lens that reads through such maps.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from layerleap.errors import NotFinite
from layerleap.short_repr import ShortRepr


@dataclass(frozen=True, eq=False, repr=False)
class Map(ShortRepr, ABC):
    """Carries rows of h[src] to layer dst; created fitted or loaded, and never changed.

    A kind names itself, declares its tensors as fields and says in `apply` what it does to rows.
    Register it with `maps.kinds.register_kind`, so that a bank can load it.
    """

    kind: ClassVar[str]  # one word: the name of the lens in tables, JSON and options
    title: ClassVar[str]  # the same for people
    about: ClassVar[str] = ""  # how such maps are made, in Markdown, for the card of a bank

    src: int
    dst: int

    @abstractmethod
    def apply(self, h: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The rows at layer dst; `tensors` are those of the map, in the dtype of `h`."""

    def __call__(self, h: Tensor) -> Tensor:
        """Rows of h[src] carried to layer dst, in the dtype and on the device of `h`."""
        stored = self.tensors()
        dtypes = (value.dtype for value in stored.values())
        wide = reduce(torch.promote_types, dtypes, h.dtype)  # keeps float64 rows
        tensors = {name: value.to(h.device, wide) for name, value in stored.items()}
        y = self.apply(h.to(wide), tensors).to(h.dtype)
        # float16 has a short range.
        if stored and h.dtype == torch.float16 and not torch.isfinite(y).all():
            raise NotFinite(
                f"states carried from layer {self.src} to layer {self.dst} exceed the range of "
                "float16; run the model in bfloat16 or float32"
            )
        return y

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name: all fields that hold one."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @classmethod
    def from_tensors(cls, src: int, dst: int, tensors: Mapping[str, Tensor]) -> Self:
        """The map that gave these tensors; other names are a `TypeError`."""
        return cls(src, dst, **tensors)

    def to(self, device: Any) -> Self:
        """The same map on another device."""
        moved = {name: value.to(device) for name, value in self.tensors().items()}
        return self.from_tensors(self.src, self.dst, moved)

    @property
    def flops(self) -> int:
        """FLOPs for one state: two per entry of the map's matrices."""
        return sum(2 * value.numel() for value in self.tensors().values() if value.dim() == 2)

    def affine(self, width: int) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias, float64, of the same map as h @ weight + bias; None if it is not one.

        Args:
            width: of the states; for maps that do not know it.
        """
        return None


@dataclass(frozen=True, eq=False, repr=False)
class IdentityMap(Map):
    """The map of the logit lens: h[dst] ~ h[src]."""

    kind: ClassVar[str] = "logit"
    title: ClassVar[str] = "logit lens"

    def apply(self, h: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The rows, unchanged."""
        return h

    def affine(self, width: int) -> tuple[Tensor, Tensor | None]:
        """The identity matrix."""
        return torch.eye(width, dtype=torch.float64), None
