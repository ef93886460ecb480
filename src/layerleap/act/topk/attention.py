"""Top-k attention: the function, and its gradients.

In: queries, keys and values of several heads, what queries see, and k. Out: for every query the
sum of the values of its k highest-scoring keys, weighted by the softmax of those k scores.

Scores are computed exactly, one chunk of queries at a time. For the backward pass only the
numbers of the selected keys are kept (int32), or nothing (`recompute`), next to what the caller
holds anyway: the score matrix is never kept. Where a query sees at most k keys nothing is selected,
and the result is plain attention. k None selects nothing anywhere: exact attention in chunks.

The gradient is that of attention over the selected keys; the selection itself is constant. It
consists of operations that autograd can follow, so it can be differentiated again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.act.topk.blocks import Block, blocks_of
from layerleap.act.topk.masks import Visible
from layerleap.act.topk.products import add_at, dense_at, dot_at, sum_at
from layerleap.errors import BadSettings


@dataclass(frozen=True, eq=False)
class Call:
    """All of one call that is not differentiated."""

    k: int | None  # None for all keys
    chunk: int
    scaling: float
    softcap: float | None
    dropout: float
    seed: int  # of dropout
    recompute: bool


def topk_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    k: int | Sequence[int] | None,
    *,
    chunk: int = 1024,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    recompute: bool = False,
) -> Tensor:
    """(text, query, head, width): attention of every query to its k highest-scoring visible keys.

    As transformers' eager attention, products are computed in the dtype of the inputs, or that of
    autocast, and scores and softmax in float32 at least. A query that sees no key gives 0. Of keys
    with the same score, the first are selected.

    Args:
        query: (text, head, query, width).
        key: (text, key head, key, width); each head serves an equal number of query heads.
        value: (text, key head, key, width of values).
        visible: which keys queries see, and what is added to their scores.
        k: how many keys a query attends to at most; one per query head; None for all.
        chunk: how many queries are computed at a time, at most.
        scaling: of the scores; one over the root of the width when None.
        softcap: scores s become softcap * tanh(s / softcap) before anything is added.
        sinks: (head,) an extra score that takes part in the softmax and is then dropped.
        dropout: the part of the weights to drop; the caller knows whether it is training.
        recompute: select again in the backward pass instead of keeping the selection.
    """
    if query.shape[1] % key.shape[1]:
        raise BadSettings(
            f"{query.shape[1]} query heads and {key.shape[1]} key heads; expected a multiple"
        )
    query, key, value = _in_one_dtype(query, key, value)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def call(k: int | None, inputs: _Inputs) -> Tensor:
        # Drawn from torch's generator, so that checkpointing, which restores that, repeats it.
        seed = int(torch.randint(2**62, ())) if dropout else 0
        return _attend(Call(k, chunk, scaling, softcap, dropout, seed, recompute), inputs)

    inputs = _Inputs(query, key, value, sinks, visible)
    if k is None or isinstance(k, int):
        return call(k, inputs)
    if len(k) != query.shape[1]:
        raise BadSettings(f"k for {len(k)} heads; this attention has {query.shape[1]}")
    groups = _heads_by_k(k, query.shape[1] // key.shape[1])
    if len(groups) == 1:
        return call(k[0], inputs)
    order = torch.tensor([head for _, heads, _ in groups for head in heads]).argsort()
    parts = [call(size, inputs.of_heads(heads, keys)) for size, heads, keys in groups]
    return torch.cat(parts, 2)[:, :, order.to(query.device)]


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Queries, keys and values in the dtype of autocast, if it is on; it leaves float64 alone.

    A model may pass float32 queries and keys, rotated, with values of half precision.
    """
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        tensors = tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
    if len({tensor.dtype for tensor in tensors}) > 1:
        names = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
        raise BadSettings(f"queries, keys and values are {names}; expected one dtype")
    return list(tensors)


def _attend(call: Call, inputs: "_Inputs") -> Tensor:
    tensors = inputs.tensors
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    with torch.autocast(inputs.query.device.type, enabled=False):
        if wants_grad:
            output: Tensor = _TopKAttention.apply(call, inputs.visible.is_causal, *tensors)
            return output
        return _forward(call, inputs, keep=False)[0]


def _heads_by_k(k: Sequence[int], group: int) -> list[tuple[int, list[int], list[int]]]:
    """By k, and by how many heads with this k share a head of keys: heads of queries and of keys.

    One selection for all of them would keep as many numbers for every head as for the largest k.
    """
    by_k: dict[tuple[int, int], tuple[int, list[int], list[int]]] = {}
    for first in range(0, len(k), group):
        for size in dict.fromkeys(k[first : first + group]):
            heads = [head for head in range(first, first + group) if k[head] == size]
            _, query_heads, key_heads = by_k.setdefault((size, len(heads)), (size, [], []))
            query_heads += heads
            key_heads.append(first // group)
    return list(by_k.values())


@dataclass(frozen=True, eq=False)
class _Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    visible: Visible

    def blocks(self, call: Call) -> Iterator[Block]:
        return blocks_of(self.query, self.key, call.chunk, is_causal=self.visible.is_causal)

    def of_heads(self, heads: list[int], keys: list[int]) -> "_Inputs":
        sinks, visible = None if self.sinks is None else self.sinks[heads], self.visible
        key, value = self.key[:, keys], self.value[:, keys]
        return _Inputs(self.query[:, heads], key, value, sinks, visible.of_heads(heads))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        visible = self.visible
        return self.query, self.key, self.value, self.sinks, visible.mask, *visible.biases

    def biased(self, scores: Tensor, index: Tensor | None, block: Block) -> Tensor:
        """Scores with biases added, and minus infinity where there is no key; changes them."""
        if index is None:
            return self.visible.apply(scores, block, self.query.shape[2], self.key.shape[2])
        biases = self.visible.biases_at(index, block)
        scores = scores if biases is None else scores + biases
        return scores.masked_fill(index < 0, -torch.inf)


class _TopKAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, is_causal: bool, *tensors: Any) -> Tensor:
        query, key, value, sinks, mask, *biases = tensors
        inputs = _Inputs(query, key, value, sinks, Visible(is_causal, mask, tuple(biases)))
        output, selected = _forward(call, inputs, keep=not call.recompute)
        ctx.call, ctx.is_causal, ctx.n_inputs = call, is_causal, len(tensors)
        ctx.save_for_backward(*tensors, *selected)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved, n = ctx.saved_tensors, ctx.n_inputs
        query, key, value, sinks, mask, *biases = saved[:n]
        inputs = _Inputs(query, key, value, sinks, Visible(ctx.is_causal, mask, tuple(biases)))
        needed = ctx.needs_input_grad[2:]
        with torch.autocast(query.device.type, enabled=False):
            gradients = _backward(ctx.call, inputs, saved[n:], grads[0], needed)
        return None, None, *gradients


def _forward(call: Call, inputs: _Inputs, *, keep: bool) -> tuple[Tensor, list[Tensor | None]]:
    """The output, and for each block the numbers of the selected keys; None for all.

    `keep` says whether a backward pass will need the numbers; without it, the list is empty.
    """
    query, value = inputs.query, inputs.value
    n_texts, n_heads, n_queries = query.shape[:3]
    output = query.new_empty(n_texts, n_queries, n_heads, value.shape[-1])
    selected: list[Tensor | None] = []
    for block in inputs.blocks(call):
        scores, index = _select(call, inputs, block)
        weights = _softmax(scores, _sink(inputs, block))[0].to(value.dtype)
        if call.dropout:
            weights = weights * _kept(weights, call, block)
        rows = sum_at(weights, block.keys_of(value), index)
        by_head = block.per_head(rows).flatten(1, 2)
        output[block.texts, block.queries, block.query_heads] = by_head.transpose(1, 2)
        if keep:
            selected.append(index)
        del scores, weights, index
    return output, selected


def _select(call: Call, inputs: _Inputs, block: Block) -> tuple[Tensor, Tensor | None]:
    """The scores that count (n, row, k), and the numbers of their keys; None for all keys.

    A number is -1 where a row has fewer keys, and its score minus infinity.
    """
    scores = _scores(call, block.rows_of(inputs.query), block.keys_of(inputs.key), None)
    scores = inputs.biased(scores, None, block)
    if call.k is None or call.k >= block.n_keys:
        return scores, None
    scores, index = _highest(scores, call.k)
    return scores, index.masked_fill_(scores == -torch.inf, -1).int()


def _highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row and their numbers; of equal ones the first.

    Which of equal scores torch selects depends on the number of keys, so that padding, chunks and
    caches would change the result. In half precision equal scores are frequent.
    """
    best, index = scores.topk(k, -1, sorted=False)
    least = best.amin(-1, keepdim=True)
    tied = scores == least
    n_selected = (best == least).sum(-1, keepdim=True)  # of the tied ones
    is_open = ((tied.sum(-1, keepdim=True) > n_selected) & (least > -torch.inf))[..., 0]
    if is_open.any():
        scores, least, tied = scores[is_open], least[is_open], tied[is_open]
        first = tied & (tied.cumsum(-1, dtype=torch.int32) <= n_selected[is_open])
        chosen = (~(scores <= least) | first).nonzero()[:, 1].view(-1, k)  # NaN counts as high
        index[is_open], best[is_open] = chosen, scores.gather(-1, chosen)
    return best, index


def _scores(call: Call, rows: Tensor, keys: Tensor, index: Tensor | None) -> Tensor:
    """Scaled and capped products in float32 or wider; biases are still to be added."""
    scores = dot_at(rows, keys, index).mul_(call.scaling).to(_wide(rows))
    return scores if call.softcap is None else torch.tanh(scores / call.softcap) * call.softcap


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _sink(inputs: _Inputs, block: Block) -> Tensor | None:
    """(text x head, group x query, 1): the sinks of a block."""
    if inputs.sinks is None:
        return None
    by_head = inputs.sinks.to(_wide(inputs.query)).reshape(-1, block.group)[block.heads]
    n_texts = len(inputs.query[block.texts])
    rows = by_head.repeat_interleave(block.queries.stop - block.queries.start, 1)
    return rows.repeat(n_texts, 1).unsqueeze(-1)


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weights of the keys and of the sink; rows that see nothing have weights 0."""
    highest = scores.detach().amax(-1, keepdim=True)
    highest = highest if sink is None else torch.maximum(highest, sink.detach())
    highest = highest.masked_fill(highest == -torch.inf, 0)
    powers = (scores - highest).exp()
    total = powers.sum(-1, keepdim=True)
    if sink is None:
        return powers / total.masked_fill(total == 0, 1), None
    sink_power = (sink - highest).exp()
    total = total + sink_power
    return powers / total, sink_power / total


def _kept(weights: Tensor, call: Call, block: Block) -> Tensor:
    """What dropout multiplies the weights of a block by: the same whenever it is asked."""
    generator = torch.Generator(weights.device).manual_seed(call.seed + block.number)
    draws = torch.rand(weights.shape, generator=generator, device=weights.device)
    kept = (draws >= call.dropout).to(weights.dtype)
    return kept / (1 - call.dropout) if call.dropout < 1 else kept


def _backward(
    call: Call,
    inputs: _Inputs,
    selected: Sequence[Tensor | None],
    grad: Tensor,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the tensors of a call, in their order; sums over blocks are float32 or wider."""
    totals = [
        torch.zeros_like(tensor, dtype=_wide(tensor)) if tensor is not None and is_needed else None
        for tensor, is_needed in zip(inputs.tensors, needed, strict=True)
    ]
    grad = grad.transpose(1, 2)  # (text, head, query, width), as queries are
    for number, block in enumerate(inputs.blocks(call)):
        index = _select(call, inputs, block)[1] if call.recompute else selected[number]
        _add_gradients(totals, call, inputs, block, index, grad)
    return [
        None if total is None or tensor is None else total.to(tensor.dtype)
        for total, tensor in zip(totals, inputs.tensors, strict=True)
    ]


def _add_gradients(
    totals: Sequence[Tensor | None],
    call: Call,
    inputs: _Inputs,
    block: Block,
    index: Tensor | None,
    grad: Tensor,
) -> None:
    """Add the gradients of one block to those of the tensors of a call."""
    rows, keys = block.rows_of(inputs.query), block.keys_of(inputs.key)
    values, grad = block.keys_of(inputs.value), block.rows_of(grad)
    scores = _scores(call, rows, keys, index)
    # The derivative of the cap, at scores that are capped already.
    slope = 1 if call.softcap is None else 1 - (scores / call.softcap).square()
    weights, sink = _softmax(inputs.biased(scores, index, block), _sink(inputs, block))
    kept = _kept(weights, call, block) if call.dropout else 1
    of_weights = dot_at(grad, values, index).to(scores.dtype) * kept
    mean = (weights * of_weights).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - mean)
    of_products = (of_scores * (slope * call.scaling)).to(rows.dtype)
    query, key, value, sinks, _, *biases = totals
    if query is not None:
        by_head = block.per_head(sum_at(of_products, keys, index)).flatten(1, 2)
        query[block.texts, block.query_heads, block.queries] += by_head
    if key is not None:
        place = key[block.texts, block.heads, : block.n_keys]
        place += add_at(of_products, rows, index, block.n_keys).reshape(place.shape)
    if value is not None:
        place = value[block.texts, block.heads, : block.n_keys]
        of_values = add_at((weights * kept).to(values.dtype), grad, index, block.n_keys)
        place += of_values.reshape(place.shape)
    if sinks is not None and sink is not None:
        sinks[block.query_heads] += block.per_head(-sink * mean).sum((0, 3, 4)).flatten()
    for total in biases:
        if total is not None:
            place = block.part_of(total)
            dense = block.per_head(dense_at(of_scores, index, block.n_keys))
            place += dense.sum_to_size(place.shape)
