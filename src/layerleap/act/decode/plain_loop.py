"""Decoding by transformers' own loop: what a decoder does when others have hooked the model.

In: what `generate` has prepared, and the code of others on the model. Out: what the library's loop
returns, and statistics: every token at full depth, one per pass.

A hook may look at positions, at shapes or at what it saw before. In passes over several tokens, or
over a few layers, it would not do what it does in `generate`, so no such pass is made.
"""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.errors import HookedModelWarning


def warn_of_hooks(hooks: str) -> None:
    """Say that a model is decoded without drafts and exits, why, and what to do."""
    warnings.warn(
        f"the model has {hooks}, which only passes over one token at a time run as "
        "`generate` does; so transformers' own loop decodes, without drafts or early exits. To "
        "decode at full speed, remove it, or make the same change with `ll.edits`",
        HookedModelWarning,
        stacklevel=3,
    )


def decode_plainly(
    model: PreTrainedModel,
    input_ids: Tensor,
    stats: Sequence[DecodingStats],
    *,
    stopping_criteria: StoppingCriteriaList,
    **prepared: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode with the model's own loop; `stats` grow with every token."""
    criteria = _Recorder(stopping_criteria)
    criteria.unfinished = dict(enumerate(stats))
    result: Tensor | GenerateDecoderOnlyOutput = type(model)._sample(
        model, input_ids, stopping_criteria=criteria, **prepared
    )
    return result


class _Recorder(StoppingCriteriaList):
    """Stopping criteria, which the loop calls after every token; they record the token."""

    unfinished: dict[int, DecodingStats]

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        """Which texts are finished."""
        finished = super().__call__(input_ids, scores, **options)
        for n, stats in list(self.unfinished.items()):
            stats.record_pass(tokens=1, layer=stats.n_layers, is_prompt=not stats.tokens)
            if finished[n]:
                del self.unfinished[n]
        return finished
