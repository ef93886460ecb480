"""What a user may give as a prompt, and its token ids.

In: a prompt: a text, chat messages, or token ids; or several of them.
Out: token ids of each, checked against the vocabulary.

    "The capital of France is"                        a text
    [{"role": "user", "content": "Hello"}]            a chat: a list of messages
    [504, 3575, 282] or a 1-D tensor or array         token ids
    ["Hello", "Goodbye"]                              several prompts; a list of lists of messages,
                                                      or of token ids, is several as well
    a 2-D tensor, or a batch of a tokenizer           several, without their padding; a tensor has
                                                      no mask, so tokens that can only be padding
                                                      are left out at both ends of a row

A chat goes through the tokenizer's chat template, which writes all special tokens, up to where the
answer begins. If its last message is the assistant's, that message is continued instead. For an
encoder-decoder, a tuple (source, target) is one prompt.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText, LayerleapError, first_line
from layerleap.models.discovery.probe import vocabulary_size

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer

Messages = Sequence[Mapping[str, Any]]
OnePrompt = str | Sequence[int] | Messages | Tensor
Prompts = list[str] | list[list[int]] | list[list[dict[str, Any]]] | tuple[str, ...]


def is_chat(prompt: Any) -> bool:
    """True for a list of messages, each a dictionary with a role."""
    is_list = isinstance(prompt, list | tuple) and bool(prompt)
    return is_list and all(isinstance(message, Mapping) and "role" in message for message in prompt)


def several(transformer: "Transformer", prompts: Any) -> list[Any] | None:
    """The prompts as a list, if they are several or a batch of several; None for one prompt."""
    if transformer.model.config.is_encoder_decoder and isinstance(prompts, tuple):
        return None  # a pair (source, target) is one prompt
    if isinstance(prompts, Mapping):
        return _of_batch(prompts)
    if isinstance(prompts, Tensor | np.ndarray) and not isinstance(prompts, Sequence):
        return _of_matrix(transformer, torch.as_tensor(prompts)) if prompts.ndim > 1 else None
    is_one = isinstance(prompts, str) or not isinstance(prompts, Iterable)
    if is_one or _is_ids(prompts) or is_chat(prompts):
        return None
    return list(prompts) or None


def _of_matrix(transformer: "Transformer", ids: Tensor) -> list[Any]:
    if ids.dim() != 2 or ids.is_floating_point():
        return list(ids)
    masks = inferred_mask(transformer, ids).bool()
    return [row[mask].tolist() for row, mask in zip(ids, masks, strict=True)]


def inferred_mask(transformer: "Transformer", ids: Tensor) -> Tensor:
    """The mask of (batch, pos) token ids: 0 for padding at either end, 1 for everything else.

    As in `generate`, a padding token that also ends texts is read as text. Two or more of them at
    an end of one row among several can only be padding, and are refused.
    """
    model, tokenizer = transformer.model, transformer.tokenizer
    settings = getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer
    known = (getattr(owner, "pad_token_id", None) for owner in settings)
    pad = next((id_ for id_ in known if id_ is not None), None)
    is_pad = ids == (-1 if pad is None else pad)
    outside = is_pad.cumprod(1).bool() | is_pad.flip(1).cumprod(1).flip(1).bool()
    outside &= ~is_pad.all(1, keepdim=True)  # nothing would be left
    ends = [getattr(owner, "eos_token_id", None) for owner in settings]
    if pad not in {id_ for end in ends for id_ in (end if isinstance(end, list) else [end])}:
        return (~outside).to(ids.dtype)
    unequal = outside.sum(1) > outside.sum(1).amin()
    for row in ((outside.sum(1) > 1) & unequal).nonzero()[:, 0].tolist():
        raise BadText(
            f"row {row + 1} of these token ids has {int(outside[row].sum())} times {pad} at an "
            "end, which may be padding or the end of a text; give the tokenizer's whole batch, "
            "with its mask, or lists of token ids"
        )
    return torch.ones_like(ids)


def _of_batch(batch: Mapping[str, Any]) -> list[Any]:
    if "role" in batch:
        raise BadText("a single message is not a chat; expected a list of messages: [message]")
    if batch.get("input_ids") is None:
        raise BadText(f"got {', '.join(map(str, batch))}; expected input_ids among them")
    texts = _lists(batch["input_ids"])
    mask = batch.get("attention_mask")
    masks = [[1] * len(text) for text in texts] if mask is None else _lists(mask)
    pairs = zip(texts, masks, strict=True)
    return [[id_ for id_, real in zip(*pair, strict=True) if real] for pair in pairs]


def _lists(values: Any) -> list[list[int]]:
    """Values of one text or of several, as lists of several."""
    rows = values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values)
    return [rows] if _is_ids(rows) else rows


def _is_ids(tokens: Any) -> bool:
    is_list = isinstance(tokens, list | tuple) and bool(tokens)
    return is_list and all(isinstance(token, Integral) for token in tokens)


@contextmanager
def numbered(number: int, of: int, noun: str = "prompt") -> Iterator[None]:
    """Name the prompt in errors, if it is one of several; numbers count from 1."""
    try:
        yield
    except LayerleapError as error:
        if of == 1:
            raise
        raise type(error)(f"{noun} {number} of {of}: {error}") from error


def encode(transformer: "Transformer", prompt: Any) -> list[int]:
    """The token ids of one prompt, checked against the vocabulary."""
    if is_chat(prompt):
        ids: Any = _of_chat(transformer, prompt)
    elif isinstance(prompt, str):
        _require_characters(prompt)
        # Not the special tokens alone.
        ids = transformer.need_tokenizer()(prompt)["input_ids"] if prompt else []
    else:
        ids = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
    if not isinstance(ids, Iterable) or not all(isinstance(token, Integral) for token in ids):
        raise BadText(
            f"cannot read {prompt!r:.60}; expected a text, chat messages (a list of dictionaries "
            "with role and content) or token ids"
        )
    if not ids:
        raise BadText("the text is empty; expected at least one token")
    known = vocabulary_size(transformer.model)
    if not all(0 <= token < known for token in ids):
        raise BadText(f"a token id is out of range; this model knows 0 to {known - 1}")
    return [int(token) for token in ids]


def encode_all(transformer: "Transformer", prompts: Sequence[Any]) -> list[list[int]]:
    """The token ids of several prompts; an error names the number of the prompt."""
    encoded = []
    for number, prompt in enumerate(prompts, 1):
        with numbered(number, len(prompts)):
            encoded.append(encode(transformer, prompt))
    return encoded


def _of_chat(transformer: "Transformer", messages: Messages) -> list[int]:
    """Token ids of a chat; the template writes the special tokens, so none are added."""
    tokenizer, name = transformer.need_tokenizer(), transformer.identity.name
    if not getattr(tokenizer, "chat_template", None):
        raise BadSettings(
            f"the tokenizer of {name} has no chat template, so chat messages cannot be read; give "
            "a text, or load the model with a tokenizer that has one"
        )
    is_begun = messages[-1]["role"] == "assistant"
    try:
        encoded = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
            return_dict=True,
        )
    except Exception as error:  # templates are programs, and raise what they like
        raise BadText(
            f"the chat template of {name} refuses these messages ({first_line(error)}); expected "
            "dictionaries with role and content, in an order that the template knows"
        ) from error
    return list(encoded["input_ids"])


def as_pair(transformer: "Transformer", pair: Any) -> tuple[Any, Any]:
    """The pair of texts; a list of two is refused, because it would be two texts."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise BadSettings(
            f"{transformer.identity.name} is an encoder-decoder; expected a tuple (source, target) "
            f"of texts, got {pair!r:.60}"
        )
    return pair


def encode_pair(
    transformer: "Transformer", source: str | Sequence[int], target: str | Sequence[int]
) -> tuple[list[int], list[int]]:
    """Token ids of the encoder and of the decoder, which starts with the model's start token.

    The decoder's last token is left out: what follows it is the end of the text.
    """
    if isinstance(target, str):
        _require_characters(target)
        target = transformer.need_tokenizer()(text_target=target)["input_ids"] if target else []
    config = transformer.model.config
    start = getattr(config, "decoder_start_token_id", None)
    start = config.bos_token_id if start is None else start
    if start is None:
        raise BadSettings(
            f"the configuration of {transformer.identity.name} names no decoder_start_token_id; "
            "give input_ids and decoder_input_ids"
        )
    return encode(transformer, source), [int(start), *encode(transformer, target)[:-1]]


def _require_characters(text: str) -> None:
    """Refuse half a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError as error:
        raise BadText(
            f"character {error.start} of the text is half a surrogate pair "
            f"(U+{ord(text[error.start]):04X}), from wrongly decoded bytes; give valid Unicode"
        ) from error
