"""Products of rows with selected keys only.

In: for every row the numbers of its selected keys. Out: dot products with them, weighted sums of
them, and weighted rows added back to them. The last is the transpose of the second; with the first,
they are all that attention and its gradients need.

Each product is computed in one of two ways: the selected keys are gathered, or weights are
scattered into a dense block of zeros. Gathering wins if only a small part of the keys is selected.
Shapes: rows (n, row, width), keys (n, key, width), index and weights (n, row, k). A negative index
is an empty place, which must have weight 0. Without an index, all keys are selected, in order.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

SPARSE = 24  # keys per selected key from which gathering is faster than a dense block
GATHERED = 2**20  # numbers gathered at a time: what fits into a processor's cache


def dot_at(rows: Tensor, keys: Tensor, index: Tensor | None) -> Tensor:
    """(n, row, k): every row times each of its selected keys."""
    if index is None:
        return rows @ keys.mT
    if not _is_sparse(index, keys):
        return (rows @ keys.mT).gather(-1, _places(index))
    parts = [
        (_gathered(keys, index[:, part]) @ rows[:, part].unsqueeze(-1)).squeeze(-1)
        for part in _parts(index, keys)
    ]
    return torch.cat(parts, 1)


def sum_at(weights: Tensor, keys: Tensor, index: Tensor | None) -> Tensor:
    """(n, row, width): the weighted sum of every row's selected keys."""
    if index is None:
        return weights @ keys
    if not _is_sparse(index, keys):
        return dense_at(weights, index, keys.shape[1]) @ keys
    parts = [
        (weights[:, part].unsqueeze(-2) @ _gathered(keys, index[:, part])).squeeze(-2)
        for part in _parts(index, keys)
    ]
    return torch.cat(parts, 1)


def add_at(weights: Tensor, rows: Tensor, index: Tensor | None, n_keys: int) -> Tensor:
    """(n, key, width): for every key, the weighted sum of the rows that selected it."""
    return dense_at(weights, index, n_keys).mT @ rows


def dense_at(weights: Tensor, index: Tensor | None, n_keys: int) -> Tensor:
    """(n, row, key): weights at the numbers of their keys, 0 elsewhere."""
    if index is None:
        return weights
    zeros = weights.new_zeros(*weights.shape[:-1], n_keys)
    return zeros.scatter_add_(-1, _places(index), weights)  # empty places add their 0 to key 0


def _is_sparse(index: Tensor, keys: Tensor) -> bool:
    return index.shape[-1] * SPARSE <= keys.shape[1]


def _places(index: Tensor) -> Tensor:
    return index.clamp_min(0).long()


def _parts(index: Tensor, keys: Tensor) -> Iterator[slice]:
    n, rows, k = index.shape
    step = max(1, GATHERED // (n * k * keys.shape[-1]))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _gathered(keys: Tensor, index: Tensor) -> Tensor:
    """(n, row, k, width): the selected keys themselves."""
    n, n_keys, width = keys.shape
    offsets = torch.arange(n, device=keys.device)[:, None, None] * n_keys
    return keys.reshape(n * n_keys, width)[_places(index) + offsets]
