"""Where attention goes: for every head the mass of its top keys, and what they are.

In: batches with kept rows. Out: `Observed`: for each row, block and head a few shares of attention;
the attention matrix of a block lives only for the kept rows of one text.

Weights are computed as the model computes them: masks, windows, soft-caps, sinks and position
biases included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerleap import Transformer
from layerleap.act.edits import ReplaceAttention
from layerleap.act.topk import check_arguments
from layerleap.models import AttentionFunction, attention_wrapped_by
from layerleap.stream import Batch
from layerleap_papers.topk_attention.passes import Rows, last_states

# Shares of a row's attention, beside those of its top k keys.
PLACES = ("first", "self", "previous", "near", "effective")
MASS = 0.9  # of the attention of a row that "needed" keys carry


@dataclass(frozen=True, eq=False)
class Observed:
    """Statistics of attention: each is (row, block, head)."""

    blocks: tuple[int, ...]
    n_heads: int
    values: dict[str, Tensor]  # by name: "top 8", "needed", and those of `PLACES`

    def column(self, name: str) -> Tensor:
        """(row, block x head)."""
        return self.values[name].flatten(1)


def observe(rows: Rows, keys: Sequence[int], window: int, tell: Callable[[int], None]) -> Observed:
    """Run the model once more over the rows, and look at its attention."""
    model, found = rows.model, list[dict[str, Tensor]]()
    modules = {
        change.module: change.block
        for change in ReplaceAttention(lambda *_: (None, None)).changes(model)
    }
    blocks = range(1, model.n_layers + 1)
    for number, batch in enumerate(rows.batches):
        tell(number)
        watcher = _Watcher(modules, model, batch, tuple(keys), window)
        with attention_wrapped_by(watcher):
            last_states(model, batch)
        found.append(watcher.stacked(blocks))
    joined = {name: torch.cat([one[name] for one in found]) for name in found[0]}
    return Observed(tuple(blocks), joined["needed"].shape[2], joined)


class _Watcher:
    """Goes around attention functions and looks at the kept rows of one batch."""

    def __init__(
        self,
        modules: dict[nn.Module, int],
        model: Transformer,
        batch: Batch,
        keys: tuple[int, ...],
        window: int,
    ) -> None:
        self.keys, self.window, self.model = keys, window, model
        self.modules = modules
        self.queries = [own.nonzero()[:, 0] for own in batch.keep.cpu()]
        self.pools = model.row_kind != "position"  # one row per text: the mean over its positions
        self.seen: dict[int, list[dict[str, Tensor]]] = {}
        self.runs: dict[nn.Module, int] = {}

    def __call__(
        self,
        function: AttentionFunction,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """As `function`; attention of modules that are not the blocks' own is left alone."""
        if module in self.modules:
            # A block that several layers share (ALBERT) runs once for each of them.
            run = self.runs[module] = self.runs.get(module, 0) + 1
            shared = list(self.model.blocks).count(self.model.blocks[self.modules[module] - 1])
            block = run if shared > 1 else self.modules[module]
            self.seen[block] = [
                self._look(text, rows, module, query, key, attention_mask, **kwargs)
                for text, rows in enumerate(self.queries)
                if len(rows)
            ]
        return function(module, query, key, value, attention_mask, **kwargs)

    def _look(
        self,
        text: int,
        rows: Tensor,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Statistics of some rows of one text: (row, head) by name."""
        weights = row_weights(
            module,
            query[text],
            key[text],
            _of_text(attention_mask, text),
            rows.to(query.device),
            **{k: _of_text(v, text) if k == "position_bias" else v for k, v in kwargs.items()},
        )
        stats = statistics(weights, rows, self.keys, self.window)
        if not self.pools:
            return stats
        return {name: value.mean(0, keepdim=True) for name, value in stats.items()}

    def stacked(self, blocks: Sequence[int]) -> dict[str, Tensor]:
        """(row, block, head) by name."""
        names = self.seen[blocks[0]][0].keys()
        return {
            name: torch.stack(
                [torch.cat([one[name] for one in self.seen[block]]) for block in blocks], dim=1
            )
            for name in names
        }


def _of_text(value: Any, text: int) -> Any:
    """The part of a mask or bias (text or 1, ...) that belongs to one text."""
    if not isinstance(value, Tensor):
        return value
    return value[text if len(value) > 1 else 0]


@torch.no_grad()
def row_weights(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    rows: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention of some rows of one text: (head, row, key), in float32.

    Args:
        module: the attention module, which may say whether it is causal.
        query: (head, query, width).
        key: (key head, key, width).
        mask: (1 or head, query, key): boolean, or added to scores; None is plain causality.
        rows: numbers of the queries.
        scaling: of scores.
        softcap: of scores.
        s_aux: (head,) scores of sinks, which take part in the softmax alone.
        position_bias: (1 or head, query, key), added to scores.
        is_causal: whether no mask means plain causality; asked of the module when None.
        dropout: not used: the model is in eval mode.
        sliding_window: not used: it is in the mask.
        kwargs: refused if they may change attention.
    """
    check_arguments(module, kwargs)
    group = query.shape[0] // key.shape[0]
    chosen = query[:, rows].float().unflatten(0, (key.shape[0], group))
    scores = (chosen @ key.float().mT[:, None]).flatten(0, 1)  # (head, row, key)
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    n_keys = key.shape[1]
    if position_bias is not None:
        scores = scores + position_bias[:, rows, :n_keys].float()
    if mask is not None:
        part = mask[:, rows, :n_keys]
        is_bool = part.dtype == torch.bool
        scores = scores.masked_fill(~part, -torch.inf) if is_bool else scores + part.float()
    elif getattr(module, "is_causal", True) if is_causal is None else is_causal:
        places = torch.arange(n_keys, device=scores.device)
        scores = scores.masked_fill(places > rows[:, None], -torch.inf)
    if s_aux is None:
        return scores.softmax(-1)
    sinks = s_aux.float().reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


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
    found = {f"top {k}": ordered[..., min(k, n_keys) - 1] / total[..., 0] for k in keys}
    found["needed"] = (ordered < MASS * total).sum(-1).float() + 1
    places, rows = torch.arange(n_keys, device=weights.device), rows.to(weights.device)
    # Padding is on the right, so the first position is that of the text.
    offsets = (places - rows[:, None]).abs()
    is_first = places == 0
    masks = {
        "first": is_first.expand_as(offsets),
        "self": (offsets == 0) & ~is_first,
        "previous": (places == rows[:, None] - 1) & ~is_first,
        "near": (offsets > 0) & (offsets <= window) & ~is_first,
    }
    for name, mask in masks.items():
        found[name] = (weights * mask).sum(-1) / total[..., 0]
    share = weights / total
    found["effective"] = torch.special.entr(share).sum(-1).exp()
    return {name: value.T.cpu() for name, value in found.items()}
