"""The arguments of `generate`: refuse what is not supported, and return what it expects.

In: what `generate` has prepared. Out: padding per text; at the end, a result of its own type.
"""

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    StoppingCriteriaList,
    StopStringCriteria,
)

from layerleap.act.decode.sampling import TokenChooser
from layerleap.errors import BadSettings, BadText, first_line
from layerleap.models.cursor.cursor import Cursor

HANDLED = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "return_dict",
}
# These depend on the index in the batch or share one clock: they need all texts in step.
IN_STEP = ("PrefixConstrained", "ClassifierFreeGuidance", "SynthID", "MaxTime")
GROWING = ("longrope", "dynamic")  # rotary embeddings that change once a text is long
# Attention in chunks, or scaled by position: keys do not depend on distance alone.
PLACED = ("attention_chunk_size", "attn_temperature_tuning")


def refuse_dropped(caller: FrameType) -> None:
    """Refuse arguments that `generate` silently keeps from a decoder that is not its own.

    A dropped streamer would never end, and whoever reads from it would wait forever.
    """
    arguments = caller.f_locals if caller.f_code.co_name == "generate" else {}
    if arguments.get("streamer") is not None:
        raise BadSettings(
            "generate does not pass its streamer on to a custom decoder; pass it as stream_to"
        )
    if arguments.get("synced_gpus"):
        raise BadSettings("synced_gpus is not supported: processes cannot stay in step here")


def check_options(config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse options that are not supported for any text."""
    if config is None:
        raise BadSettings("a decoder is called by generate; pass it as custom_generate")
    if config.num_beams > 1:
        raise BadSettings(
            f"beam search ({config.num_beams} beams) is not supported: beams advance in step, but "
            "with drafts or early exits each text advances at its own pace; use num_beams=1"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise BadSettings(
            f"{mode.value.replace('_', ' ')} is not supported by this decoder; leave out the "
            "options that select it"
        )
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise BadSettings(
            "attentions and hidden states are not returned, as passes cover several tokens; leave "
            "out output_attentions and output_hidden_states"
        )
    unknown = {name for name, value in model_kwargs.items() if value is not None} - HANDLED
    if unknown:
        raise BadSettings(f"model argument {min(unknown)!r} is not supported; leave it out")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (type(cache) is not DynamicCache or cache.offloading):
        name = "offloaded cache" if type(cache) is DynamicCache else type(cache).__name__
        raise BadSettings(
            f"a {name} cannot be cut token by token and layer by layer; leave out "
            "cache_implementation, or pass a DynamicCache"
        )


def check_batch(
    skips: Sequence[int],
    config: Any,
    model_kwargs: Mapping[str, Any],
    streamer: Any,
    processors: Any,
    criteria: Any,
) -> None:
    """Refuse options that are not supported for several texts, or for padded ones."""
    cache = model_kwargs.get("past_key_values")
    has_begun = cache is not None and cache.get_seq_length()
    if any(skips) and (has_begun or _returns_cache(cache, config)):
        raise BadSettings(
            "a cache of padded texts cannot be passed in or returned; decode one text at a time"
        )
    if len(skips) == 1:
        return
    if streamer is not None:
        raise BadSettings(f"cannot stream {len(skips)} texts at once; decode one text at a time")
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        raise BadSettings("scores of several texts are not returned; decode one text at a time")
    for name in (type(one).__name__ for one in [*(processors or ()), *(criteria or ())]):
        if any(part in name for part in IN_STEP):
            raise BadSettings(
                f"{name} needs all texts of a batch in step, but each is decoded at "
                "its own pace; decode one text at a time"
            )


def check_positions(config: Any, n_prompt: int, max_length: int) -> None:
    """Refuse rotary embeddings that would change on the way and invalidate cached keys."""
    rope = _rope(config)
    first = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in GROWING and first and n_prompt <= first < max_length:
        raise BadSettings(
            f"this model's rotary embedding ({rope['rope_type']}) changes beyond {first} tokens, "
            f"and the text would grow from {n_prompt} to {max_length}; stay on one side of it"
        )


def stop_criteria(tokenizer: Any, strings: str | Sequence[str]) -> StoppingCriteriaList:
    """What stops a text after the token that completes one of these strings.

    `generate` loses the tokenizer that `stop_strings` needs when the decoding loop is not its own.
    """
    texts = [strings] if isinstance(strings, str) else list(strings)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise BadSettings(f"stop_strings is {strings!r}; expected strings that are not empty")
    if tokenizer is None:
        raise BadSettings("stop_strings need a tokenizer; pass it as tokenizer=...")
    try:
        return StoppingCriteriaList([StopStringCriteria(tokenizer, texts)])
    except ValueError as error:  # tokens whose text is not known, as in a vocabulary of words
        raise BadSettings(
            f"transformers cannot match stop strings with this tokenizer ({first_line(error)}); "
            "leave out stop_strings"
        ) from error


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a text."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else eos if isinstance(eos, list) else [eos]


def depends_on_place(config: Any) -> bool:
    """True if attention depends on where in the cache a text starts, or on its length."""
    text = config.get_text_config()
    return _rope(config).get("rope_type") in GROWING or any(
        getattr(text, name, None) for name in PLACED
    )


def _rope(config: Any) -> Mapping[str, Any]:
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    return rope if isinstance(rope, Mapping) else {}


def padding(input_ids: Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> list[int]:
    """The number of padding tokens at the beginning of each text."""
    n_ids = input_ids.shape[1]
    if n_ids == 0:
        raise BadText("the prompt is empty; expected at least one token")
    mask, places = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    # `generate` drops a mask of ones and only keeps its length.
    length = getattr(config, "_mask_length", None) or n_ids if mask is None else mask.shape[1]
    if length != n_ids:
        raise BadSettings(
            f"{n_ids} token ids do not match a mask of {length}; with a cache, pass the whole "
            "text, not only the new tokens"
        )
    mask = torch.ones_like(input_ids) if mask is None else mask
    skips = []
    for row, is_real in enumerate(mask.bool()):
        n = int(is_real.sum())
        if not n:
            raise BadText("a prompt consists of padding only; expected at least one token")
        if not is_real[-n:].all():
            raise BadSettings(
                "the attention mask has gaps or padding on the right; pad on the left"
            )
        if places is not None:
            positions = places[row if len(places) > 1 else 0][-n:]
            if not torch.equal(positions.cpu(), torch.arange(n)[-len(positions) :]):
                raise BadSettings("position_ids other than 0, 1, 2, ... are not supported")
        skips.append(n_ids - n)
    return skips


def _returns_cache(cache: Cache | None, config: Any) -> bool:
    is_own = getattr(cache, "_is_user_defined", False)
    return cache is not None and bool(config.return_dict_in_generate or is_own)


def result(
    input_ids: Tensor,
    choosers: Sequence[TokenChooser],
    cursor: Cursor | None,
    config: Any,
    cache: Cache | None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What `generate` returns: all texts, padded on the right to the longest."""
    longest = max(len(chooser.chosen) for chooser in choosers)
    pad = config._pad_token_tensor
    fill = int(pad) if pad is not None else 0
    tails = [one.chosen + [fill] * (longest - len(one.chosen)) for one in choosers]
    sequences = torch.cat([input_ids, torch.tensor(tails, device=input_ids.device)], 1)
    is_single = len(choosers) == 1
    if cache is not None and cursor is not None and is_single and _returns_cache(cache, config):
        cursor.cache.give(cache)
    if not config.return_dict_in_generate:
        return sequences
    scores, logits = choosers[0].scores, choosers[0].logits
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=None if scores is None else tuple(scores),
        logits=None if logits is None else tuple(logits),
        past_key_values=cache if is_single else None,
    )
