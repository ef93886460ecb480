"""Attention for one row at a time, as in passes over one token.

In: a pass over several tokens. Out: for each of them the bits that a pass of its own would give.

In bfloat16 a logit has three digits, so two tokens are often nearly tied, and another order of
summation decides. Matrix products of a few rows sum each row in the same order as products of one
(`packed` takes care of that), but attention kernels do not: the order of the sum over keys depends
on how many keys there are, masked ones included. So each row attends to its own keys alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Keys = slice | Tensor  # the keys that a row sees


class RowByRow:
    """Goes around attention functions; keeps what rows see, which is the same in many layers."""

    def __init__(self) -> None:
        self.n_split = 0  # calls that were made row by row
        self._mask: Tensor | None = None
        self._keys: list[Keys] | None = None

    def __call__(
        self,
        function: Callable[..., tuple[Any, Any]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """As `function`, which is called for one row of `query` (1, head, row, width) at a time."""
        if query.shape[:3:2] == (1, 1):
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        if attention_mask is not self._mask or attention_mask is None:
            self._mask = attention_mask
            self._keys = _keys(attention_mask, query.shape[2], key.shape[2])
        if self._keys is None or len(query) > 1:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        self.n_split += 1
        rows = []
        for n, keys in enumerate(self._keys):
            visible = key[:, :, keys], value[:, :, keys]
            row = function(module, query[:, :, n : n + 1], *visible, None, *args, **kwargs)
            rows.append(row[0])
        return torch.cat(rows, 1), None


def _keys(mask: Tensor | None, n_rows: int, n_keys: int) -> list[Keys] | None:
    """The keys of each row; None if the mask does more than hide keys."""
    if mask is None:
        return [slice(0, n_keys - n_rows + n + 1) for n in range(n_rows)]
    if mask.shape != (1, 1, n_rows, n_keys):
        return None
    visible = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
    if mask.dtype != torch.bool and not (mask[0, 0][~visible] < -1e4).all():
        return None  # biases, which a row without a mask would lack
    keys: list[Keys] = []
    for row in visible:
        at = row.nonzero()[:, 0]
        is_prefix = bool(row[: len(at)].all())
        keys.append(slice(0, len(at)) if is_prefix else at)
    return keys
