"""Attention of chosen blocks restricted to the k keys with the highest scores.

In: k for a model, a block or a head. Out: an edit for `model.edit`, for every model whose attention
goes through transformers' interface. The function itself is in `act/topk`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from layerleap.act.edits.attention import ReplaceAttention
from layerleap.act.topk.interface import attention_function, check_cache
from layerleap.act.topk.pages import (
    PagedKeys,
    Pages as Pages,  # `edits.Pages`
)
from layerleap.act.topk.topk_settings import K, TopKSettings
from layerleap.arguments import check_fields
from layerleap.errors import BadSettings
from layerleap.models.hooks.edit import Change, Edit
from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class TopKAttention(Edit):
    """Let every query attend only to its k highest-scoring keys, in some blocks or in all.

        with model.edit(ll.edits.TopKAttention(k=64)):
            print(ll.generate(model, "Once upon a time"))

    Weights are the softmax over the selected scores. Masks, windows, soft-caps, sinks and position
    biases act as they do in the model. Where a query sees at most k keys, attention is exact.

    With `pages`, passes over one token per text score only the keys of some pages of the cache:
    not exact. Other passes, and those that compute gradients, score all keys.
    """

    k: K = 64  # keys per query; or one number per query head; or either of them by block
    chunk: int = 1024  # queries computed at a time, at most
    blocks: Sequence[int] | None = None  # 1 to n_layers; all that k is given for when None
    recompute: bool = False  # select again in the backward pass instead of keeping the selection
    pages: Pages | None = None  # while decoding, score only the pages of keys that can matter

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "k", self.settings.k)
        if self.pages is not None and self.pages.n_keys < (most := self.settings.most):
            raise BadSettings(
                f"{self.pages.keep} pages of {self.pages.size} keys hold fewer than k, {most}; "
                "keep more pages"
            )
        named = self.settings.blocks
        if named is None or self.blocks is None:
            return
        if missing := [block for block in self.blocks if block not in named]:
            raise BadSettings(
                f"blocks has block {missing[0]}, but k has no number for it; leave out blocks, or "
                "give k for each of them"
            )

    @property
    def settings(self) -> TopKSettings:
        """The options of the function."""
        return TopKSettings(self.k, self.chunk, self.recompute)

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the attention modules of the blocks."""
        settings = self.settings
        blocks = settings.blocks if self.blocks is None else self.blocks
        anywhere = ReplaceAttention(attention_function(settings), blocks).changes(transformer)
        return [self._change(change) for change in anywhere]

    def _change(self, change: Change) -> Change:
        paged = None if self.pages is None else PagedKeys(self.pages)
        function = attention_function(self.settings, change.block, paged)
        return replace(change, function=function, begin=partial(_begin, paged))


def _begin(paged: PagedKeys | None, cache: Any) -> None:
    check_cache(cache)
    if paged is not None:
        paged.begin(cache)
