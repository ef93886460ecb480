"""Which arguments of a block have a row per position, discovered by watching them grow.

In: a wrapped decoder. Out: `Axes`, with which a block can be given some of the rows of a pass, or
the nodes of a tree, whatever its family calls masks, positions and biases.

A dimension that is as long as the tokens of a pass, in two passes of different length, counts
queries; one as long as all tokens so far counts keys. Arguments with both are masks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import ModelRefused
from layerleap.models.cursor.tree import Tree

Name = int | str  # an argument by place or by name
Spec = Any  # (query, key) dimensions of a tensor, a list of specs of a sequence, or None
# Rearranges a tensor that was made for a chain of tokens, given its query and key dimensions.
Arrange = Callable[[Tensor, int | None, int | None], Tensor]


@dataclass(frozen=True, eq=False)
class BlockArguments:
    """What one block was called with, without the state."""

    queries: int
    keys: int
    arguments: Mapping[Name, Any]


@dataclass(frozen=True, eq=False)
class Axes:
    """The dimensions of every argument of every block."""

    specs: tuple[Mapping[Name, Spec], ...]  # by block, the first at 0
    branches: bool = False  # tokens may branch: verified by `verify.find_axes`
    batches: bool = False  # several texts may share a pass: verified there too

    def fit(
        self,
        block: int,
        name: Name,
        value: Any,
        rows: int,
        arrange: Arrange | None,
        fitted: dict[Any, Any],
    ) -> Any:
        """`value`, cut to the last `rows` queries, or rearranged for tokens that are not a chain.

        `fitted` holds the results for the same tensors in other blocks of this pass.
        """
        spec = self.specs[block - 1].get(name)
        if spec is None:
            return value
        if value is None:
            raise ModelRefused(
                f"block {block} was called without its mask {name!r}, so its rows cannot be told "
                "apart; either the attention implementation has changed, or nothing was run before"
            )
        key = id(value), rows
        if key not in fitted:
            # The value is held as well, so that its id is not used again.
            fitted[key] = value, _fit(value, spec, rows, arrange)
        return fitted[key][1]


def _fit(value: Any, spec: Spec, rows: int, arrange: Arrange | None) -> Any:
    if isinstance(spec, list):
        return type(value)(_fit(v, s, rows, arrange) for v, s in zip(value, spec, strict=True))
    if spec is None or not isinstance(value, Tensor):
        return value
    query, key = spec
    if arrange is not None:
        return arrange(value, query, key)
    return value if query is None else value.narrow(query, value.shape[query] - rows, rows)


def branch(tree: Tree, value: Tensor, query: int | None, key: int | None) -> Tensor:
    """A mask or bias of a chain, rearranged for nodes that branch.

    Tensors with queries but no keys follow from the positions that the model was given, and are
    right already. The bias of a key is that of its position. In a mask, each node takes the row of
    its position, and the columns of nodes outside its path are masked.
    """
    if key is None:
        return value
    begin, depths = value.shape[key] - len(tree), torch.tensor(tree.depths, device=value.device)
    positions = torch.cat([torch.arange(begin, device=value.device), begin + depths])
    if query is None:
        return value.index_select(key, positions)
    first = value.narrow(query, 0, 1)
    masked = first.narrow(key, value.shape[key] - 1, 1)  # the first token does not see the last
    arranged = value.index_select(query, depths).index_select(key, positions)
    visible = torch.ones(len(tree), value.shape[key], dtype=torch.bool, device=value.device)
    visible[:, begin:] = tree.visible().to(value.device)
    if query > key:
        visible = visible.T
    shape = [1] * value.dim()
    shape[query], shape[key] = len(tree), value.shape[key]
    return torch.where(visible.reshape(shape), arranged, masked)


def compare(passes: tuple[list[BlockArguments], list[BlockArguments]]) -> Axes:
    """The axes behind two passes of different lengths."""
    specs = []
    for first, second in zip(*passes, strict=True):
        if set(first.arguments) != set(second.arguments):
            raise ModelRefused("a block is called with different arguments from pass to pass")
        pairs = {name: (value, second.arguments[name]) for name, value in first.arguments.items()}
        specs.append({name: _spec(*pair, first, second) for name, pair in pairs.items()})
    return Axes(tuple(specs))


def _spec(a: Any, b: Any, first: BlockArguments, second: BlockArguments) -> Spec:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        sizes = list(zip(a.shape, b.shape, strict=True)) if a.dim() == b.dim() else []
        query = _dimension(sizes, (first.queries, second.queries))
        key = _dimension(sizes, (first.keys, second.keys))
        return None if query is None and key is None else (query, key)
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        specs = [_spec(x, y, first, second) for x, y in zip(a, b, strict=True)]
        return specs if any(spec is not None for spec in specs) else None
    return None


def _dimension(sizes: list[tuple[int, int]], pair: tuple[int, int]) -> int | None:
    matching = [at for at, size in enumerate(sizes) if size == pair]
    if len(matching) > 1:
        raise ModelRefused(
            f"two dimensions of a block's argument are {pair[0]} long, so queries cannot be told "
            "from others"
        )
    return matching[0] if matching else None
