"""Top-k attention as transformers calls it, and registered under a name.

In: settings. Out: a function with the signature of transformers' attention interface, and the name
of an attention implementation that any model which uses the interface can be set to.

Whatever a family passes that changes attention is computed or refused by name, never ignored.
"""

from collections.abc import Callable, Iterator
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    QuantizedCache,
)
from transformers.masking_utils import sdpa_mask

from layerleap.act.topk.attention import topk_attend
from layerleap.act.topk.masks import visible_from
from layerleap.act.topk.pages import PagedKeys
from layerleap.act.topk.topk_settings import K, Ks, TopKSettings
from layerleap.errors import BadSettings, ModelRefused

# Arguments that say nothing about attention, or nothing beyond the mask.
HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
REFUSED = {
    "cache": "a paged cache",
    "output_attentions": "attention weights, which are never computed as a whole",
    "cu_seq_lens_q": "texts packed into one row; give each text its own row",
    "cu_seq_lens_k": "texts packed into one row; give each text its own row",
    "cu_seqlens": "texts packed into one row; give each text its own row",
    "indices": "keys selected by the model itself",
    "block_indices": "keys selected by the model itself",
}
_REGISTERING = Lock()


def topk_attention(k: K = 64, chunk: int = 1024, *, recompute: bool = False) -> str:
    """Register top-k attention with transformers, and return the name of the implementation.

        name = ll.topk_attention(k=64)
        model = AutoModelForCausalLM.from_pretrained("...", attn_implementation=name)
        model.set_attn_implementation(name)    # or of a model that is loaded
        model.set_attn_implementation("sdpa")  # back again

    Every query attends only to its k highest-scoring keys. There is one name for each setting, and
    asking for it again changes nothing. Gradients are correct, and training keeps k numbers per
    query and head instead of a score for every key.

    Args:
        k: how many keys a query attends to; or one number for each query head; or either of them by
            block, counted from 1: `{1: 128, 2: 16}`. Blocks that are not named keep all keys.
        chunk: how many queries are computed at a time, at most.
        recompute: select again in the backward pass instead of keeping the selection.
    """
    settings = TopKSettings(k, chunk, recompute)
    name = settings.name
    with _REGISTERING:
        if name not in AttentionInterface._global_mapping:
            AttentionMaskInterface.register(name, _mask)
            AttentionInterface.register(name, attention_function(settings))
    return name


def attention_function(
    settings: TopKSettings, block: int | None = None, paged: PagedKeys | None = None
) -> Callable[..., tuple[Tensor, None]]:
    """The function as transformers calls it, for one block or for all of them.

    `paged` belongs to one block, and to a cache that it is told about before every pass.
    """

    def topk(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        k = settings.k_of(_block_of(module, settings) if block is None else block)
        _check_window(module, key, attention_mask, kwargs.get("sliding_window"))
        learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        if paged is not None and not learns:
            if kwargs.get("position_bias") is not None:
                raise BadSettings(
                    f"{type(module).__name__} adds position biases to scores, which summaries of "
                    "pages do not have; use TopKAttention without pages"
                )
            key, value, attention_mask = paged.narrow(
                query, key, value, attention_mask, kwargs.get("scaling")
            )
        return attend(settings, k, module, query, key, value, attention_mask, **kwargs), None

    topk.__name__ = settings.name
    return topk


def attend(
    settings: TopKSettings,
    k: Ks | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """(text, query, head, width): the output of one attention module.

    A sliding window is in the mask.
    """
    check_arguments(module, kwargs)
    check_cache(kwargs.get("past_key_values"))  # where a family passes it
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    n_queries = query.shape[2]
    is_causal = bool(is_causal) and attention_mask is None and n_queries > 1
    if is_causal and key.shape[2] > n_queries:
        # Without a mask, transformers means a cache of fixed size that was empty before.
        key, value = key[:, :, :n_queries], value[:, :, :n_queries]
        position_bias = None if position_bias is None else position_bias[..., :n_queries]
    added = {"attention_mask": attention_mask, "position_bias": position_bias}
    visible = visible_from(added, query, key, is_causal=is_causal)
    return topk_attend(
        query,
        key,
        value,
        visible,
        k,
        chunk=settings.chunk,
        scaling=scaling,
        softcap=softcap,
        sinks=_sinks(module, s_aux, query),
        dropout=dropout,
        recompute=settings.recompute,
    )


def check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Refuse arguments of attention that change it and are not supported here."""
    for name, value in arguments.items():
        is_off = value is None or value is False
        # max_length_... belongs to cu_seq_lens, which is refused.
        if is_off or name in HARMLESS or name.startswith("max_length_"):
            continue
        what = REFUSED.get(name, "an argument that is not known here and may change attention")
        raise ModelRefused(
            f"{type(module).__name__} calls attention with {name!r}: {what}; top-k attention "
            "cannot compute that, so set another attention implementation"
        )


def _check_window(module: nn.Module, key: Tensor, mask: Tensor | None, window: int | None) -> None:
    if mask is None and window is not None and key.shape[2] > window:
        raise ModelRefused(
            f"{type(module).__name__} has a sliding window of {window} keys but was given "
            f"{key.shape[2]} keys without a mask; expected a mask that has the window"
        )


def check_cache(cache: Any) -> None:
    """Refuse keys that are not those of the model."""
    layers = getattr(cache, "layers", ())
    if isinstance(cache, QuantizedCache) or any(hasattr(one, "_quantize") for one in layers):
        raise BadSettings(
            f"{type(cache).__name__} holds quantised keys, so scores and the selection would not "
            "be those of the model; use a cache without quantisation"
        )


def _sinks(module: nn.Module, s_aux: Tensor | None, query: Tensor) -> Tensor | None:
    if s_aux is not None and s_aux.numel() != query.shape[1]:
        raise ModelRefused(
            f"{type(module).__name__} calls attention with 's_aux' of shape "
            f"{tuple(s_aux.shape)}; expected one number for each of {query.shape[1]} heads"
        )
    return None if s_aux is None else s_aux.flatten()


def _block_of(module: nn.Module, settings: TopKSettings) -> int:
    """The number of the block that a module belongs to, from 1; 0 if k is the same everywhere."""
    if settings.blocks is None:
        return 0
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise BadSettings(
            f"{type(module).__name__} does not know its block (layer_idx), so k by block cannot be "
            "used; give one k, or use ll.edits.TopKAttention"
        )
    config: Any = getattr(module, "config", None)
    n_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(n_layers, int) and (wrong := [b for b in settings.blocks if b > n_layers]):
        raise BadSettings(
            f"k is given for block {wrong[0]}, which does not exist: this model has blocks 1 to "
            f"{n_layers}"
        )
    return int(layer) + 1


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    allow_is_causal_skip: bool = True,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The boolean mask of sdpa; none only where queries are as many as keys, or a single one."""
    kind: Any = type(config)
    if config is not None and (model := _without_interface(kind)):
        raise ModelRefused(
            f"{model} does not use transformers' AttentionInterface, so its attention function "
            "cannot be replaced; load it with another attn_implementation"
        )
    may_skip = allow_is_causal_skip and q_length in (1, kv_length)
    kwargs |= {"allow_is_causal_skip": may_skip, "config": config}
    return sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)


@cache
def _without_interface(config: type[PreTrainedConfig]) -> str | None:
    """A model class of this configuration whose attention does not go through the interface.

    transformers accepts any name when it loads such a model, and then ignores it.
    """
    package = config.__module__.rpartition(".")[0]  # a family's own classes, not those of users
    names = [
        model.__name__
        for model in _subclasses(PreTrainedModel)
        if model.config_class is config and model.__module__.rpartition(".")[0] == package
        if not model._can_set_attn_implementation()
    ]
    return min(names, key=len, default=None)


def _subclasses(base: type[PreTrainedModel]) -> Iterator[type[PreTrainedModel]]:
    for child in base.__subclasses__():
        yield child
        yield from _subclasses(child)
