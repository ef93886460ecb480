"""Attention functions of chosen blocks replaced by another function.

In: a function with the signature of transformers' attention interface. Out: an edit for
`model.edit`, for every model whose attention goes through that interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.probe import probe
from layerleap.models.hooks.attention import AttentionFunction, attention_chosen_by
from layerleap.models.hooks.capture import check_block
from layerleap.models.hooks.edit import Change, Edit
from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class ReplaceAttention(Edit):
    """Compute self-attention with `function` in some blocks, or in all of them.

    It is called as transformers calls its own implementations:

        def average(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
            ...
            return output, None  # output: (batch, query, head, head width)

        with model.edit(ll.edits.ReplaceAttention(average, blocks=[5, 6])):
            ...

    The mask is what the model makes for its own implementation. With "sdpa" it is boolean, or None
    where plain causal attention is meant: query i sees the keys up to i. A cache of fixed size may
    then have more keys than there are queries, all of them empty; a single query sees all keys.
    The decoders of this package write what `generate` writes only if each query's output depends on
    nothing but that query and the keys and values that its mask leaves visible.
    """

    function: AttentionFunction
    blocks: Sequence[int] | None = None  # 1 to n_layers; all when None

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return f"ReplaceAttention({name}, blocks={self.blocks})"

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the attention modules of the blocks, which one probe pass tells."""
        if not callable(self.function):
            raise BadSettings(
                f"{self.function!r} is not callable; expected a function with the signature of "
                "transformers' AttentionInterface"
            )
        blocks = range(1, transformer.n_layers + 1) if self.blocks is None else self.blocks
        for block in blocks:
            check_block(transformer, block)
        used = _modules_used(transformer)
        return [
            Change(block, module, "attention", self.function)
            for block in blocks
            for module in _attention_of(transformer, block, used)
        ]


@torch.no_grad()
def _modules_used(transformer: Transformer) -> set[nn.Module]:
    """The modules that look up their attention function."""
    modules: set[nn.Module] = set()
    with attention_chosen_by(lambda module: modules.add(module)):
        transformer.model(**probe(transformer.model, rows=1))
    return modules


def _attention_of(transformer: Transformer, block: int, used: set[nn.Module]) -> list[nn.Module]:
    root, sites = transformer.block(block), transformer.sites(block)
    if "cross.in" in sites:  # attends to an encoder, and is left alone
        root = root.get_submodule(sites["attn.in"].path)
    modules = [module for module in root.modules() if module in used]
    if not modules:
        raise ModelRefused(
            f"{type(transformer.model).__name__} does not use transformers' AttentionInterface in "
            f"block {block}, so its attention function cannot be replaced"
        )
    return modules
