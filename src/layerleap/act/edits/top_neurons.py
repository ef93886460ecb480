"""Sparse FFNs: at each position only the k neurons that matter most are kept.

In: how many neurons to keep, and what makes one matter. Out: an edit for `model.edit`.

    size             |coefficient| * norm of the value vector: the length of what the neuron adds
    magnitude        |coefficient|
    signed           the coefficient itself
    pre-activation   what enters the activation: key . x, or gate . x in a gated FFN

"Memory-efficient Transformers via Top-k Attention" (arXiv 2106.06899) keeps the largest signed
pre-activations of ReLU FFNs, which have no negative coefficients. In a gated FFN about half of the
large coefficients are negative, and the two signed rules drop them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings
from layerleap.models.hooks.capture import check_block
from layerleap.models.hooks.edit import Change, Edit
from layerleap.models.hooks.rows import Rows
from layerleap.models.transformer import Transformer
from layerleap.models.weights import FeedForward, feed_forward, feed_forwards, ffn_keys

By = Literal["size", "magnitude", "signed", "pre-activation"]
Score = Callable[[Tensor], Tensor]  # coefficients (row, neuron) -> what is ranked, same shape


@dataclass(frozen=True)
class TopKNeurons(Edit):
    """Keep the k largest coefficients of each position and set the others to 0.

        with model.edit(ll.edits.TopKNeurons(k=256)):
            logits = model.model(**inputs).logits

    A block with at most k neurons is left alone, so nothing changes there, bit for bit. Rows are
    chosen one by one: the result at a position does not depend on others.

    With `gather`, passes over a single token multiply only by the rows of the down-projection whose
    coefficients are not 0, from a copy of it laid out row by row. That saves reading the others
    from memory, and sums in another order, so results are equal up to rounding.
    """

    k: int | Mapping[int, int]  # for every block, or by block
    by: By = "size"
    blocks: Sequence[int] | None = None  # 1 to n_layers; all, or those that `k` names, when None
    gather: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        given = self.k.values() if isinstance(self.k, Mapping) else [self.k]
        if isinstance(self.k, Mapping) and (self.blocks is not None or not self.k):
            raise BadSettings(
                f"k is given by block ({dict(self.k)}) and blocks are {self.blocks}; expected one "
                "or more blocks in k, and blocks left out"
            )
        for k in given:
            if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
                raise BadSettings(f"k is {k!r}; expected how many neurons to keep, 1 or more")

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the input of each block's down-projection."""
        found = []
        feed_forwards(transformer)  # one pass verifies all blocks
        for block, k in self._by_block(transformer).items():
            ffn = feed_forward(transformer, block)
            if k < ffn.n_neurons:
                found += self._changes(transformer, ffn, k)
        return found

    def _by_block(self, transformer: Transformer) -> dict[int, int]:
        if isinstance(self.k, Mapping):
            by_block = dict(self.k)
        else:
            every = range(1, transformer.n_layers + 1)
            by_block = dict.fromkeys(every if self.blocks is None else self.blocks, self.k)
        for block in by_block:
            check_block(transformer, block)
        return by_block

    def _changes(self, transformer: Transformer, ffn: FeedForward, k: int) -> list[Change]:
        before, score = self._score(transformer, ffn)
        module = ffn.module(transformer)
        changes = [*before, Change(ffn.block, module, "in", partial(_keep, k, score))]
        if self.gather:
            table = _RowMajor(transformer, ffn)
            changes.append(Change(ffn.block, module, "compute", partial(_gathered, table)))
        return changes

    def _score(self, transformer: Transformer, ffn: FeedForward) -> tuple[list[Change], Score]:
        """What coefficients are ranked by, and the changes that it needs before."""
        if self.by == "size":
            lengths = ffn.written(transformer).norm(dim=1)
            return [], lambda values: values.abs() * lengths.to(values.device)
        if self.by == "magnitude":
            return [], torch.abs
        if self.by == "signed":
            return [], lambda values: values
        return _pre_activations(transformer, ffn)


def _pre_activations(
    transformer: Transformer, ffn: FeedForward
) -> tuple[list[Change], Callable[[Tensor], Tensor]]:
    """What enters the activation, remembered on its way."""
    rows = ffn_keys(transformer, ffn.block).rows
    keys = rows["ffn.gate"] if "ffn.gate" in rows else rows["ffn.key"]
    module = transformer.model.get_submodule(keys.path)
    products: list[Tensor] = []

    def remember(values: Tensor, _: Any) -> tuple[Tensor, int]:
        products[:] = [values if keys.chosen is None else values[:, list(keys.chosen)]]
        return values, 0

    return [Change(ffn.block, module, "out", remember)], lambda _: products.pop()


def _keep(k: int, score: Score, values: Tensor, _: Callable[[], Rows]) -> tuple[Tensor, int]:
    return keep_highest(k, score, values), len(values)


def keep_highest(k: int, score: Score, values: Tensor) -> Tensor:
    """The values (row, neuron) with all but the k highest scores of each row set to 0."""
    kept = score(values).topk(k, dim=1, sorted=False).indices
    return torch.zeros_like(values).scatter(1, kept, values.gather(1, kept))


class _RowMajor:
    """Value vectors laid out row by row, and copied again when the weights have changed.

    A column of `nn.Linear` is scattered over all of its memory.
    """

    def __init__(self, transformer: Transformer, ffn: FeedForward) -> None:
        self._transformer, self._ffn = transformer, ffn
        self._copy: Tensor | None = None
        self._stamp: tuple[int, int] | None = None

    @property
    def bias(self) -> Tensor | None:
        return self._ffn.bias(self._transformer)

    @property
    def values(self) -> Tensor:
        values = self._ffn.values(self._transformer)
        stamp = values.data_ptr(), 0 if values.is_inference() else values._version
        if self._copy is None or stamp != self._stamp:
            self._copy, self._stamp = values.contiguous(), stamp
        return self._copy


def _gathered(table: _RowMajor, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The down-projection of one row from the value vectors of its active neurons alone."""
    values = args[0] if args else None
    is_one_row = isinstance(values, Tensor) and values.numel() == values.shape[-1]
    if not is_one_row or torch.is_grad_enabled() or kwargs:
        return forward(*args, **kwargs)
    assert isinstance(values, Tensor)
    row = values.reshape(-1)
    active = row.nonzero()[:, 0]
    total = row[active] @ table.values.index_select(0, active)  # twice as fast as values[active]
    bias = table.bias
    return (total if bias is None else total + bias).reshape(*values.shape[:-1], -1)
