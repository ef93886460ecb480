"""Top-k attention written the plain way, for autograd to differentiate: the reference of tests."""

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_topk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k: int | Sequence[int],
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(text, query, head, width), from the whole matrix of scores."""
    n_heads = query.shape[1]
    key = key.repeat_interleave(n_heads // key.shape[1], 1)
    value = value.repeat_interleave(n_heads // value.shape[1], 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    ks = [k] * n_heads if isinstance(k, int) else k
    lowest = [
        scores[:, head].topk(min(own, key.shape[2]), -1).values[..., -1:]
        for head, own in enumerate(ks)
    ]
    scores = scores.masked_fill(scores < torch.stack(lowest, 1), -torch.inf)
    if sinks is not None:
        own = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, own], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    return (weights @ value).transpose(1, 2)


def causal(n_queries: int, n_keys: int) -> Tensor:
    """(1, 1, query, key): True where a key is visible, the last query seeing the last key."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)[None, None]
