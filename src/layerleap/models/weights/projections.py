"""Which rows of which matrix make the queries, keys and values of attention.

In: the calls inside one attention module, and what attention was called with. Out: `Split` for the
values, `Projection` for queries and keys.

Separate matrices are recognised by what they give. A fused matrix holds queries, keys and values
one after the other (GPT-2, Phi-3), or head by head (GPT-NeoX, Falcon).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerleap.models.discovery.compare import ROUNDING, is_same, rounding
from layerleap.models.discovery.sites import is_norm
from layerleap.models.discovery.trace import Call
from layerleap.models.transformer import Transformer
from layerleap.models.weights.matrices import Rows, matrix_of
from layerleap.models.weights.norms import fold_of

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Projection:
    """Queries or keys: rows of a matrix, perhaps a norm, and a constant factor."""

    rows: Rows
    n_heads: int
    norm: str | None = None  # path of the norm they pass: per head, or over all heads at once
    factor: float = 1.0

    def of(self, transformer: Transformer) -> Tensor:
        """(head * d_head, d_model); with the gain of the norm, without its division by the size."""
        rows = self.rows.of(transformer)
        if self.norm is not None:
            norm = transformer.model.get_submodule(self.norm)
            width = next(norm.parameters()).shape[-1]
            fold = fold_of(norm, rows.new_zeros(1, width))
            rows = fold.into_writer(rows.T.unflatten(-1, (-1, width))).flatten(-2).T
        return rows if self.factor == 1.0 else rows * self.factor

    @torch.no_grad()
    def apply(self, transformer: Transformer, x: Tensor) -> Tensor:
        """(row, pos, d_model) -> (row, head, pos, d_head), as they are before any rotation."""
        bias = self.rows.bias(transformer)
        made = x.reshape(len(x), -1, x.shape[-1]) @ self.rows.of(transformer).T
        made = made if bias is None else made + bias
        if self.norm is not None:
            norm = transformer.model.get_submodule(self.norm)
            width = next(norm.parameters()).shape[-1]
            made = norm(made.unflatten(-1, (-1, width))).flatten(-2)
        return made.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) * self.factor


@dataclass(frozen=True, eq=False)
class Split:
    """Where the values are; and queries and keys, if they share a fused matrix with them."""

    call: Call
    n_kv_heads: int
    width: int
    values: Rows
    queries: Rows | None = None
    keys: Rows | None = None


def find_values(calls: list[Call], mixed: Tensor, n_heads: int) -> Split | None:
    """The matrix whose output, shared by groups of heads, is `mixed`: (row, head * width).

    `mixed` is what enters the output matrix for texts of one token.
    """
    width = mixed.shape[1] // n_heads
    target = mixed.unflatten(1, (n_heads, width))
    for call in calls:
        rows = matrix_of(call) if call.gives is not None else None
        if rows is None or call.gives is None:
            continue
        gives = call.gives.reshape(-1, call.gives.shape[-1])
        for n_kv, places in _layouts(gives.shape[1], n_heads, width):
            values = gives[:, list(places[2])].unflatten(1, (n_kv, width))
            if len(gives) == len(mixed) and _is_scaled(
                values.repeat_interleave(n_heads // n_kv, 1), target
            ):
                if len(places[0]) == 0:
                    return Split(call, n_kv, width, rows)
                parts = [replace(rows, chosen=place) for place in places]
                return Split(call, n_kv, width, parts[2], parts[0], parts[1])
    return None


def _layouts(
    size: int, n_heads: int, width: int
) -> Iterator[tuple[int, tuple[Indices, Indices, Indices]]]:
    """Where queries, keys and values may lie in `size` outputs, by number of key-value heads."""
    if size % width:
        return
    n = size // width
    if n <= n_heads and n_heads % n == 0:
        yield n, ((), (), tuple(range(size)))  # a matrix of its own
    n_kv, odd = divmod(n - n_heads, 2)
    if odd or n_kv < 1 or n_heads % n_kv:
        return
    ends = (n_heads * width, (n_heads + n_kv) * width)
    yield n_kv, (tuple(range(ends[0])), tuple(range(*ends)), tuple(range(ends[1], size)))
    # Group by group: the queries of a group, then its key and its value.
    places = torch.arange(size).reshape(n_kv, -1, width)
    parts = (places[:, :-2], places[:, -2], places[:, -1])
    queries, keys, values = (tuple(part.flatten().tolist()) for part in parts)
    yield n_kv, (queries, keys, values)


def _is_scaled(ours: Tensor, theirs: Tensor) -> bool:
    """True if each head is the same up to a factor of at most 1.

    Attention to a single token is 1, or less if a learned sink takes its share.
    """
    exact, target = ours.double(), theirs.double()
    factor = (exact * target).sum(-1) / exact.square().sum(-1).clamp_min(1e-30)
    if not bool(((factor > 0) & (factor <= 1 + 1e-2)).all()):
        return False
    return is_close(exact * factor[..., None], theirs)


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    """True if rows differ by rounding only, relative to the size of the row."""
    allowed = max(rounding(theirs), ROUNDING[torch.float32])  # rotations are made in float32
    ours, theirs = ours.double(), theirs.double()
    size = theirs.norm(dim=-1).clamp_min(1e-30)
    return bool(((ours - theirs).norm(dim=-1) <= allowed * size).all())


def find_projection(calls: list[Call], fused: Rows | None, attended: Tensor) -> Projection | None:
    """The rows behind queries or keys, (row, head, 1, d_head); None if none give them.

    Queries and keys may pass a norm after the matrix. `fused` are the rows of a fused matrix that
    must be the ones, if there is one.
    """
    n_heads, target = attended.shape[1], attended.flatten(1)
    for call in calls:
        if call.gives is None or (fused is not None and call.path != fused.path):
            continue
        rows = matrix_of(call)
        if rows is None:
            continue
        gives = call.gives.reshape(-1, call.gives.shape[-1])
        if fused is not None:
            rows, gives = fused, gives[:, list(fused.chosen or ())]
        candidates: list[tuple[str | None, Tensor]] = [(None, gives)]
        for other in calls:
            # A norm with modules of its own treats heads apart, in an order that is not known.
            is_plain = is_norm(other.module) and not list(other.module.children())
            if is_plain and is_same(other.takes, gives) and other.gives is not None:
                candidates.append((other.path, other.gives.reshape(gives.shape)))
        for norm, made in candidates:
            factor = _common_factor(made, target)
            if factor is not None:
                return Projection(rows, n_heads, norm, factor)
    return None


def _common_factor(ours: Tensor, theirs: Tensor) -> float | None:
    """The factor between two tensors; some families scale queries before attention."""
    if ours.shape != theirs.shape:
        return None
    exact, target = ours.double(), theirs.double()
    factor = float((exact * target).sum() / exact.square().sum().clamp_min(1e-30))
    if factor <= 0 or not is_close(exact * factor, theirs):
        return None
    return 1.0 if abs(factor - 1) < 1e-4 else factor


def agree_at_offset_0(query: Tensor, key: Tensor, true_query: Tensor, true_key: Tensor) -> bool:
    """True if every token has the same score with itself; all are (row, head, pos, d_head)."""
    ours, theirs = (
        (q.double() * k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)).sum(-1)
        for q, k in ((query, key), (true_query, true_key))
    )
    size = true_query.double().norm(dim=-1).amax() * true_key.double().norm(dim=-1).amax()
    allowed = max(rounding(true_query), ROUNDING[torch.float32])  # rotations are made in float32
    return bool(((ours - theirs).abs() <= allowed * size).all())
