"""Tokens that branch, to be looked at in one pass.

In: ids and which node each follows. Out: depths, and who sees whom.
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
                f"a tree of {len(self.ids)} tokens with {len(self.parents)} parents; as many of "
                "both, and at least one, were wanted"
            )
        if not all(-1 <= parent < node for node, parent in enumerate(self.parents)):
            raise BadSettings(f"parents {self.parents} do not come before their children")

    @classmethod
    def chain(cls, ids: Sequence[int]) -> "Tree":
        """One token after another."""
        return cls(tuple(ids), tuple(range(-1, len(ids) - 1)))

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many nodes lie above each."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return tuple(found)

    @cached_property
    def is_chain(self) -> bool:
        """True if nothing branches."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def sees(self) -> Tensor:
        """(node, node): True where the column is the row itself or lies above it."""
        if self.is_chain:
            return torch.ones(len(self), len(self), dtype=torch.bool).tril()
        found = torch.zeros(len(self), len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[node] = found[parent]
            found[node, node] = True
        return found

    def children(self, node: int) -> dict[int, int]:
        """The nodes that follow `node`, by their token; the first of equal ones."""
        found: dict[int, int] = {}
        for child, parent in enumerate(self.parents):
            if parent == node:
                found.setdefault(self.ids[child], child)
        return found
