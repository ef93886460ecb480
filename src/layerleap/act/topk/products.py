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

SPARSE = 32  # keys per selected key from which gathering is faster than a dense block
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
    if not torch.is_grad_enabled() and keys.dtype in (torch.float32, torch.float64):
        rows = torch.nn.functional.embedding_bag(  # copies no keys; has no second derivative
            _numbers(index, keys).flatten(0, 1),
            keys.reshape(-1, keys.shape[-1]),
            per_sample_weights=weights.flatten(0, 1),
            mode="sum",
        )
        return rows.unflatten(0, index.shape[:2])
    parts = [
        (weights[:, part].unsqueeze(-2) @ _gathered(keys, index[:, part])).squeeze(-2)
        for part in _parts(index, keys)
    ]
    return torch.cat(parts, 1)


def add_at(weights: Tensor, rows: Tensor, index: Tensor | None, n_keys: int) -> Tensor:
    """(n, key, width): for every key, the weighted sum of the rows that selected it."""
    total = rows.new_zeros(len(rows), n_keys, rows.shape[-1])
    if index is None or not _is_sparse(index, total):
        return dense_at(weights, index, n_keys).mT @ rows
    flat, numbers = total.flatten(0, 1), _numbers(index, total)
    for part in _parts(index, rows):
        weighted = weights[:, part].unsqueeze(-1) * rows[:, part].unsqueeze(-2)
        flat = flat.index_add_(0, numbers[:, part].flatten(), weighted.flatten(0, 2))
    return flat.view_as(total)


def dense_at(weights: Tensor, index: Tensor | None, n_keys: int) -> Tensor:
    """(n, row, key): weights at the numbers of their keys, 0 elsewhere."""
    if index is None:
        return weights
    zeros = weights.new_zeros(*weights.shape[:-1], n_keys)
    return zeros.scatter_add_(-1, _places(index), weights)  # empty places add their 0 to key 0


def _is_sparse(index: Tensor, keys: Tensor) -> bool:
    _, rows, k = index.shape
    return k * min(SPARSE, rows) <= keys.shape[1]


def _places(index: Tensor) -> Tensor:
    return index.clamp_min(0).long()


def _parts(index: Tensor, keys: Tensor) -> Iterator[slice]:
    n, rows, k = index.shape
    step = max(1, GATHERED // (n * k * keys.shape[-1]))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _gathered(keys: Tensor, index: Tensor) -> Tensor:
    """(n, row, k, width): the selected keys themselves."""
    return keys.reshape(-1, keys.shape[-1])[_numbers(index, keys)]


def _numbers(index: Tensor, keys: Tensor) -> Tensor:
    """Numbers of the selected keys among those of all n."""
    n, n_keys = keys.shape[:2]
    return _places(index) + torch.arange(n, device=keys.device)[:, None, None] * n_keys
