"""Attention scores before the softmax, recorded while the model runs.

In: a wrapped model, and for each row of a batch the query position and the keys that are wanted.
Out: per block and row, (head, key): query @ key * scale, as the attention function in use has them
before its mask and softmax; grouped heads share keys, and a cap is applied if the function does.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.hooks.attention import attention_wrapped_by
from layerleap.models.transformer import Transformer


class ScoreRecorder:
    """Goes around attention functions and keeps the scores of one query per row of the batch."""

    def __init__(self, transformer: Transformer, wanted: Sequence[tuple[int, range]]) -> None:
        self.wanted = wanted  # by row: the position of the query, and those of the keys
        self.scores: dict[int, list[Tensor]] = {}  # by block: (head, key) of each row
        self._name = transformer.identity.name
        self._blocks = {
            module: number
            for number in range(1, transformer.n_layers + 1)
            for module in transformer.block(number).modules()
        }

    @torch.no_grad()
    def __call__(
        self,
        function: Callable[..., tuple[Any, Any]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[Any, Any]:
        """As `function`; queries and keys are (row, head, pos, width)."""
        if (block := self._blocks.get(module)) is not None:
            own = (_scores(function, query[n], key[n], *w, options) for n, w in self._rows())
            self.scores[block] = list(own)
        return function(module, query, key, *args, **options)

    def _rows(self) -> Iterator[tuple[int, tuple[int, range]]]:
        return enumerate(self.wanted)

    def of_block(self, block: int) -> list[Tensor]:
        """The scores of a block, by row."""
        if block not in self.scores:
            raise ModelRefused(
                f"attention of block {block} of {self._name} does not go through transformers' "
                "attention interface, so its scores cannot be recorded"
            )
        return self.scores[block]


def _scores(
    function: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    at: int,
    keys: range,
    options: dict[str, Any],
) -> Tensor:
    """(head, key) of one row, in float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query[:, at].to(wide)
    k = key[:, keys.start : keys.stop].to(wide).repeat_interleave(len(q) // len(key), 0)
    scale = options.get("scaling")
    scores = torch.einsum("hd,hkd->hk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    cap = options.get("softcap")
    if cap is not None and "softcap" in inspect.signature(function).parameters:
        scores = cap * torch.tanh(scores / cap)
    return scores


@contextmanager
def scores_recorded(
    transformer: Transformer, wanted: Sequence[tuple[int, range]]
) -> Iterator[ScoreRecorder]:
    """Record the scores of every pass on this thread; the last pass is kept."""
    recorder = ScoreRecorder(transformer, wanted)
    with attention_wrapped_by(recorder):
        yield recorder
