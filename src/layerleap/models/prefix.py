"""A beginning that several texts share, run once: the others continue from its cache.

In: a wrapped decoder and token ids. Out: arguments of forward passes over the rest of each text.

Whether a model gives the same logits that way is verified once, on random tokens; for one that does
not, or that has no cache of keys and values, nothing is shared.
"""

import copy
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
from transformers import DynamicCache

from layerleap.models.changes import Known
from layerleap.models.discovery.compare import rounding, row_gap
from layerleap.models.discovery.probe import accepts, prepare, probe_ids
from layerleap.models.hooks.edit import unedited
from layerleap.models.hooks.foreign import foreign_code
from layerleap.models.hooks.forward import hooks_of
from layerleap.models.inputs import padded, run
from layerleap.models.transformer import Transformer

SHORTEST = 8  # tokens that are worth a pass of their own
_SHARES: Known[bool] = Known()


class Prefix:
    """The cache after some tokens; without tokens, texts run as they are."""

    def __init__(self, transformer: Transformer, ids: Sequence[int] = ()) -> None:
        self.transformer, self.length, self._cache = transformer, len(ids), DynamicCache()
        if ids:
            arguments = prepare(transformer.model, padded(transformer, [ids]))
            with torch.no_grad():
                arguments |= {"past_key_values": self._cache, "use_cache": True}
                run(transformer, arguments)

    def inputs(self, rests: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Arguments of a pass over what follows the prefix in each text."""
        arguments: dict[str, Any] = padded(self.transformer, rests)
        if not self.length:
            return arguments
        cache = copy.deepcopy(self._cache)  # a pass adds to it
        cache.batch_repeat_interleave(len(rests))
        shared = torch.ones(len(rests), self.length, dtype=torch.long)
        mask = torch.cat([shared, arguments["attention_mask"]], 1)
        return {**arguments, "attention_mask": mask, "past_key_values": cache}


def shared_prefix(
    transformer: Transformer, texts: Sequence[Sequence[int]], apart: Sequence[int]
) -> Prefix:
    """What all texts begin with, if it is worth running once and the model allows it.

    `apart` is, by text, how many of its last tokens are not to be shared. Edits and hooks of others
    may act on positions of a pass, so with them nothing is shared.
    """
    begins = [tuple(text[: len(text) - n]) for text, n in zip(texts, apart, strict=True)]
    columns = takewhile(lambda column: len(set(column)) == 1, zip(*begins, strict=False))
    common = [column[0] for column in columns] if len(begins) > 1 else []
    is_changed = hooks_of(transformer.model).edits is not None or foreign_code(transformer.model)
    if len(common) < SHORTEST or is_changed or not can_share(transformer):
        return Prefix(transformer)
    return Prefix(transformer, common)


def can_share(transformer: Transformer) -> bool:
    """True if texts that continue from a cache get the same logits; verified once per model."""
    with hooks_of(transformer.model).lock, unedited(transformer.model):
        return _SHARES.of(transformer, lambda: _verify(transformer))


@torch.no_grad()
def _verify(transformer: Transformer) -> bool:
    model = transformer.model
    is_plain = transformer.kind == "next-token" and not model.config.is_encoder_decoder
    if not is_plain or not accepts(model, "past_key_values"):
        return False
    first, *others = probe_ids(model, 4, 7, seed=41).tolist()
    rests = [row[: 3 + n] for n, row in enumerate(others)]  # of different lengths
    try:
        shared = Prefix(transformer, first).inputs(rests)
        ours = run(transformer, prepare(model, shared)).logits
        for row, rest in enumerate(rests):
            alone = prepare(model, padded(transformer, [[*first, *rest]]))
            theirs = run(transformer, alone).logits[0, len(first) :]
            gap = row_gap(ours[row, : len(rest)], theirs, centre=True)
            if gap > rounding(theirs):
                return False
    except Exception:  # whatever a model without such a cache raises: then nothing is shared
        return False
    return True
