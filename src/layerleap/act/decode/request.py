"""What `generate` asks for: what cannot be honoured is refused, the rest given as it wants it.

In: what it has prepared. Out: padding per text; and at the end its own kind of result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from layerleap.act.decode.sampling import TokenChooser
from layerleap.errors import BadSettings, BadText
from layerleap.models.cursor.cursor import Cursor

HANDLED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep",
           "cache_position", "return_dict"}  # fmt: skip
# These know which text of a batch they serve, or share one clock: they need all texts in step.
IN_STEP = ("PrefixConstrained", "ClassifierFreeGuidance", "SynthID", "MaxTime")
GROWING = ("longrope", "dynamic")  # rotary positions that change once a text is long
# Attention in chunks, or sharper further on: keys are not only told apart by their distance.
PLACED = ("attention_chunk_size", "attn_temperature_tuning")


def check(config: Any, model_kwargs: Mapping[str, Any], synced_gpus: bool) -> None:
    """Refuse what no text could be decoded with."""
    if config is None:
        raise BadSettings("a decoder is called by generate: give it as custom_generate")
    if config.num_beams > 1:
        raise BadSettings(
            f"beam search ({config.num_beams} beams) keeps several texts in step, and early exits "
            "and guesses take each at its own pace; use num_beams=1"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise BadSettings(
            f"{mode.value.replace('_', ' ')} is a way of decoding of its own; leave out what asks "
            "for it"
        )
    if synced_gpus:
        raise BadSettings("several processes in step (synced_gpus) cannot leave early or guess")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise BadSettings(
            "attentions and hidden states of passes over several tokens are not kept; leave out "
            "output_attentions and output_hidden_states"
        )
    if others := [k for k, v in model_kwargs.items() if v is not None and k not in HANDLED]:
        raise BadSettings(f"argument {sorted(others)[0]!r} cannot be passed on to the model here")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (type(cache) is not DynamicCache or cache.offloading):
        name = "offloaded cache" if type(cache) is DynamicCache else type(cache).__name__
        raise BadSettings(
            f"a {name} cannot be taken back token by token and layer by layer; leave out "
            "cache_implementation, or hand over a DynamicCache"
        )


def check_rows(
    skips: Sequence[int],
    config: Any,
    model_kwargs: Mapping[str, Any],
    streamer: Any,
    processors: Any,
    criteria: Any,
) -> None:
    """Refuse what several texts, or padded ones, could not be decoded with."""
    cache = model_kwargs.get("past_key_values")
    if any(skips) and (_is_wanted(cache, config) or (cache is not None and cache.get_seq_length())):
        raise BadSettings("a cache of padded texts cannot be handed over or back; give one text")
    if len(skips) == 1:
        return
    if streamer is not None:
        raise BadSettings(f"{len(skips)} texts cannot be streamed at once; give one")
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        raise BadSettings("scores of several texts at once are not kept; give one text")
    for one in [*(processors or ()), *(criteria or ())]:
        if any(name in type(one).__name__ for name in IN_STEP):
            raise BadSettings(
                f"{type(one).__name__} needs all texts of a batch in step, and each is decoded at "
                "its own pace; give one text at a time"
            )


def check_positions(config: Any, n_prompt: int, max_length: int) -> None:
    """Refuse rotary positions that would change on the way: keys kept before would be stale."""
    rope = _rope(config)
    first = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in GROWING and first and n_prompt <= first < max_length:
        raise BadSettings(
            f"this model's positions ({rope['rope_type']}) change beyond {first} tokens, and the "
            f"text would grow from {n_prompt} to {max_length}; stay on one side of it"
        )


def ends(model: Any) -> list[int]:
    """The tokens that end a text."""
    found = model.generation_config.eos_token_id
    return [] if found is None else found if isinstance(found, list) else [found]


def is_placed(config: Any) -> bool:
    """True if attention depends on where in a cache a text stands, or on how long it is."""
    text = config.get_text_config()
    return _rope(config).get("rope_type") in GROWING or any(
        getattr(text, name, None) for name in PLACED
    )


def _rope(config: Any) -> Mapping[str, Any]:
    found = getattr(config.get_text_config(), "rope_parameters", None)
    return found if isinstance(found, Mapping) else {}


def padding(input_ids: Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> list[int]:
    """How many tokens at the beginning of each text are padding."""
    n_ids = input_ids.shape[1]
    if n_ids == 0:
        raise BadText("the prompt is empty; at least one token was wanted")
    mask, places = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    # A mask of ones is dropped by `generate`, which then only remembers its length.
    length = getattr(config, "_mask_length", None) or n_ids if mask is None else mask.shape[1]
    if length != n_ids:
        raise BadSettings(
            f"{n_ids} token ids with a mask of {length}: with a cache, give the whole text and not "
            "only what is new"
        )
    kept = torch.ones_like(input_ids) if mask is None else mask
    found = []
    for row, is_kept in enumerate(kept.bool()):
        n = int(is_kept.sum())
        if not n:
            raise BadText("a prompt is nothing but padding; at least one token was wanted")
        if not is_kept[-n:].all():
            raise BadSettings(
                "the attention mask has gaps, or padding on the right; pad on the left"
            )
        if places is not None:
            given = places[row if len(places) > 1 else 0][-n:]
            if not torch.equal(given.cpu(), torch.arange(n)[-len(given) :]):
                raise BadSettings("position_ids other than 0, 1, 2, ... cannot be honoured here")
        found.append(n_ids - n)
    return found


def _is_wanted(cache: Cache | None, config: Any) -> bool:
    is_own = getattr(cache, "_is_user_defined", False)
    return cache is not None and bool(config.return_dict_in_generate or is_own)


def result(
    input_ids: Tensor,
    choices: Sequence[TokenChooser],
    walk: Cursor | None,
    config: Any,
    cache: Cache | None,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What `generate` gives: all texts, padded on the right to the longest."""
    longest = max(len(choice.chosen) for choice in choices)
    pad = config._pad_token_tensor
    fill = int(pad) if pad is not None else 0
    tails = [choice.chosen + [fill] * (longest - len(choice.chosen)) for choice in choices]
    sequences = torch.cat([input_ids, torch.tensor(tails, device=input_ids.device)], 1)
    is_single = len(choices) == 1
    if cache is not None and walk is not None and is_single and _is_wanted(cache, config):
        walk.cache.give(cache)
    if not config.return_dict_in_generate:
        return sequences
    scores, logits = choices[0].scores, choices[0].logits
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=None if scores is None else tuple(scores),
        logits=None if logits is None else tuple(logits),
        past_key_values=cache if is_single else None,
    )
