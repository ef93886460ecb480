"""Tokens that branch, to run in one pass.

In: ids, and which node each follows. Out: depths, and which nodes see which.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from layerleap.errors import BadSettings


@dataclass(frozen=True)
class Tree:
    """Node n follows `parents[n]`, -1 being the text so far; parents come before children."""

    ids: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ids or len(self.ids) != len(self.parents):
            raise BadSettings(
                f"a tree of {len(self.ids)} tokens with {len(self.parents)} parents; expected at "
                "least one token, and one parent for each"
            )
        if not all(-1 <= parent < node for node, parent in enumerate(self.parents)):
            raise BadSettings(
                f"parents {self.parents}; expected every parent before its children, and -1 for "
                "nodes that follow the text"
            )

    @classmethod
    def chain(cls, ids: Sequence[int]) -> "Tree":
        """One token after another."""
        return cls(tuple(ids), tuple(range(-1, len(ids) - 1)))

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many nodes are above each."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def is_chain(self) -> bool:
        """True if nothing branches."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def visible(self) -> Tensor:
        """(node, node): True where the column is the row itself or one of its ancestors."""
        if self.is_chain:
            return torch.ones(len(self), len(self), dtype=torch.bool).tril()
        visible = torch.zeros(len(self), len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                visible[node] = visible[parent]
            visible[node, node] = True
        return visible

    def children(self, node: int) -> dict[int, int]:
        """The nodes that follow `node`, by their token; the first of equal ones."""
        children: dict[int, int] = {}
        for child, parent in enumerate(self.parents):
            if parent == node:
                children.setdefault(self.ids[child], child)
        return children
