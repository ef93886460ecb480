"""Attention of chosen blocks restricted to the k keys with the highest scores.

In: k for a model, a block or a head. Out: an edit for `model.edit`, for every model whose attention
goes through transformers' interface. The function itself is in `act/topk`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layerleap.act.edits.attention import ReplaceAttention
from layerleap.act.topk.interface import attention_function
from layerleap.act.topk.settings import K, TopKSettings
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
    """

    k: K = 64  # keys per query; or one number per query head; or either of them by block
    chunk: int = 1024  # queries computed at a time, at most
    blocks: Sequence[int] | None = None  # 1 to n_layers; all that k is given for when None
    recompute: bool = False  # select again in the backward pass instead of keeping the selection

    def __post_init__(self) -> None:
        named = self.settings.by_block
        if None in named or self.blocks is None:
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
        settings, blocks = self.settings, self.blocks
        if blocks is None and None not in settings.by_block:
            blocks = [block for block in settings.by_block if block is not None]
        anywhere = ReplaceAttention(attention_function(settings), blocks).changes(transformer)
        return [
            replace(change, function=attention_function(settings, change.block))
            for change in anywhere
        ]
