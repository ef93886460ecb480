"""Where attention goes: for every head the mass of its top keys, and what they are.

In: batches with kept rows. Out: for each row, block and head a few shares of attention; the
attention matrix of a block lives only while that block runs on one batch.

Weights come from the model's own attention functions: masks, windows, soft-caps, sinks and position
biases included.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerleap import Transformer
from layerleap.act.edits import ReplaceAttention
from layerleap.models import AttentionFunction, attention_wrapped_by
from layerleap.stream import Batch
from layerleap_papers.topk_attention.comparisons import Rows, last_states

# Shares of a row's attention, beside those of its top k keys.
PLACES = ("first", "self", "previous", "near", "effective")
MASS = 0.9  # of the attention of a row that "needed" keys carry


def observe(
    rows: Rows, keys: Sequence[int], window: int, tell: Callable[[int], None]
) -> dict[str, Tensor]:
    """Statistics of the attention of all rows: (row, block, head) by name.

    Names are "top 8" and so on, "needed", and those of `PLACES`.
    """
    modules = ReplaceAttention(lambda *_: (None, None)).changes(rows.model)
    batches = []
    for number, batch in enumerate(rows.batches):
        tell(number)
        waiting: dict[nn.Module, list[int]] = {}
        for change in modules:  # several blocks of a module that layers share, as in ALBERT
            waiting.setdefault(change.module, []).append(change.block)
        batches.append(_observe(rows.model, batch, waiting, keys, window))
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _observe(
    model: Transformer,
    batch: Batch,
    waiting: dict[nn.Module, list[int]],
    keys: Sequence[int],
    window: int,
) -> dict[str, Tensor]:
    """The same for one batch; `waiting` are the blocks that each module runs as, in order."""
    pools = model.row_kind != "position"  # one row per text: the mean over its positions
    blocks: dict[int, list[dict[str, Tensor]]] = {}

    def watch(
        function: AttentionFunction, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        if waiting.get(module):  # attention of other modules is left alone
            texts = blocks[waiting[module].pop(0)] = []
            weights = attention_weights(function, module, *args, **kwargs)
            for of_text, keep in zip(weights, batch.keep.to(weights.device), strict=True):
                if keep.any():
                    kept = keep.nonzero()[:, 0]
                    values = statistics(of_text[:, kept], kept, keys, window)
                    texts.append({k: v.mean(0, True) if pools else v for k, v in values.items()})
        return function(module, *args, **kwargs)

    with attention_wrapped_by(watch):
        last_states(model, batch)
    by_block = [blocks[block] for block in sorted(blocks)]
    return {
        name: torch.stack([torch.cat([text[name] for text in texts]) for texts in by_block], 1)
        for name in by_block[0][0]
    }


@torch.no_grad()
def attention_weights(
    function: AttentionFunction,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    """(text, head, query, key): what attention gives if the values are the identity matrix."""
    n = key.shape[2]
    identity = torch.eye(n, dtype=value.dtype, device=value.device).expand(*value.shape[:2], n, n)
    weights = function(module, query, key, identity, attention_mask, **kwargs)[0]
    return torch.as_tensor(weights).transpose(1, 2).float()


def statistics(
    weights: Tensor, rows: Tensor, keys: Sequence[int], window: int
) -> dict[str, Tensor]:
    """Mass of the top keys and of some places, from (head, row, key): (row, head) by name.

    top k      the share of the k keys with the most attention
    needed     how many keys carry 90 % of it
    first      the first position of the text
    self       the row's own position
    previous   the position before it
    near       positions up to `window` before or after it, itself and the first one left out
    effective  exp(entropy): as many keys as attention is spread over
    """
    ordered = weights.sort(dim=-1, descending=True).values.cumsum(-1)
    total = ordered[..., -1:].clamp_min(1e-30)  # below 1 where a sink takes part
    n_keys = weights.shape[-1]
    values = {f"top {k}": ordered[..., min(k, n_keys) - 1] / total[..., 0] for k in keys}
    values["needed"] = (ordered < MASS * total).sum(-1).float() + 1
    places, rows = torch.arange(n_keys, device=weights.device), rows.to(weights.device)
    # Padding is on the right, so the first position is that of the text.
    offsets = (places - rows[:, None]).abs()
    is_first = places == 0
    masks = {
        "first": is_first,
        "self": (offsets == 0) & ~is_first,
        "previous": (places == rows[:, None] - 1) & ~is_first,
        "near": (offsets > 0) & (offsets <= window) & ~is_first,
    }
    for name, mask in masks.items():
        values[name] = (weights * mask).sum(-1) / total[..., 0]
    values["effective"] = torch.special.entr(weights / total).sum(-1).exp()
    return {name: value.T.cpu() for name, value in values.items()}
