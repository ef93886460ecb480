"""What a model is given, as arguments of its forward pass.

In: a text, several texts, pairs of texts, token ids, a tensor, or a batch of a tokenizer.
Out: keyword arguments of the forward pass; and padding moved to the right, where no family's
positions can be wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText, first_line
from layerleap.models.discovery.probe import vocabulary_size
from layerleap.models.discovery.tail import LAST

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer

# By mask, the arguments that have the same positions.
MASKED = {
    "attention_mask": ("input_ids", "token_type_ids", "inputs_embeds"),
    "decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds"),
}
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")


def as_inputs(transformer: "Transformer", given: Any) -> dict[str, Any]:
    """Arguments of the forward pass for anything a user may have at hand.

    Args:
        transformer: the model; its tokenizer reads texts.
        given: a text or several; token ids of one text or of several; for an encoder-decoder, a
            pair (source, target) or several; a tensor of token ids, pixels or sound features; or
            the arguments themselves, as a tokenizer or processor returns them.
    """
    if isinstance(given, Mapping):
        is_list = isinstance(given.get("input_ids"), list)  # without return_tensors
        if is_list and not transformer.model.config.is_encoder_decoder:
            return padded(transformer, several(transformer, given) or [])
        return dict(given)
    if isinstance(given, Tensor):
        return _from_tensor(transformer, given)
    return _from_texts(transformer, given)


def run(transformer: "Transformer", arguments: Mapping[str, Any]) -> Any:
    """The model's output; arguments that do not fit the model are an error in words."""
    try:
        return transformer.model(**arguments)
    except (TypeError, ValueError, IndexError) as error:
        is_pair = transformer.model.config.is_encoder_decoder
        hint = "; an encoder-decoder reads a pair (source, target)" if is_pair else ""
        raise BadSettings(
            f"{transformer.identity.name} cannot run on {', '.join(arguments)}: "
            f"{type(error).__name__}: {first_line(error)}{hint}"
        ) from error


def _from_tensor(transformer: "Transformer", given: Tensor) -> dict[str, Any]:
    main = transformer.model.main_input_name
    if not given.numel():
        raise BadText("the tensor is empty; expected at least one token")
    if not given.is_floating_point() and given.dim() in (1, 2) and main == "input_ids":
        ids = given if given.dim() == 2 else given[None]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if given.is_floating_point() and main != "input_ids":
        return {main: given}
    raise BadSettings(
        f"a tensor of {tuple(given.shape)} and {given.dtype} does not fit {main} of "
        f"{transformer.identity.name}; expected token ids of (batch, pos), or {main} by name: "
        f"{{{main!r}: tensor}}"
    )


def _from_texts(transformer: "Transformer", given: Any) -> dict[str, Any]:
    if isinstance(given, str) or _is_ids(given):
        given = [given]
    is_pair = transformer.model.config.is_encoder_decoder
    if is_pair and isinstance(given, tuple) and len(given) == 2:
        given = [given]
    if not isinstance(given, Sequence) or not given:
        raise BadSettings(
            f"cannot read {given!r:.60}; expected a text, token ids, a tensor, several of these, "
            "or a tokenizer's batch"
        )
    if not is_pair:
        return padded(transformer, [encode(transformer, text) for text in given])
    pairs = [encode_pair(transformer, *as_pair(transformer, one)) for one in given]
    sources, targets = zip(*pairs, strict=True)
    return {
        **padded(transformer, sources),
        **{f"decoder_{name}": value for name, value in padded(transformer, targets).items()},
    }


def as_pair(transformer: "Transformer", given: Any) -> tuple[Any, Any]:
    """`given`, if it is a pair of texts; a list of two would be two texts."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise BadSettings(
            f"{transformer.identity.name} is an encoder-decoder; expected a tuple (source, target) "
            f"of texts, got {given!r:.60}"
        )
    return given


def several(transformer: "Transformer", given: Any) -> list[Any] | None:
    """The texts in `given`, if it holds several, or a batch of them; None if it is one text."""
    if transformer.model.config.is_encoder_decoder and isinstance(given, tuple):
        return None  # a pair (source, target) is one text
    if isinstance(given, Mapping):
        if given.get("input_ids") is None:
            raise BadText(f"got {', '.join(map(str, given))}; expected input_ids among them")
        texts = _lists(given["input_ids"])
        mask = given.get("attention_mask")
        masks = [[1] * len(text) for text in texts] if mask is None else _lists(mask)
        pairs = zip(texts, masks, strict=True)
        return [[id_ for id_, real in zip(*pair, strict=True) if real] for pair in pairs]
    if isinstance(given, Tensor):
        return None if given.dim() < 2 else list(given)
    is_one = isinstance(given, str) or not isinstance(given, Sequence) or _is_ids(given)
    return None if is_one or not given else list(given)


def _lists(values: Any) -> list[list[int]]:
    """Values of one text or of several, as lists of several."""
    rows = values.tolist() if isinstance(values, Tensor) else list(values)
    return [rows] if _is_ids(rows) else rows


def _is_ids(given: Any) -> bool:
    is_list = isinstance(given, list | tuple) and bool(given)
    return is_list and all(isinstance(token, int) for token in given)


def encode(transformer: "Transformer", text: str | Sequence[int]) -> list[int]:
    """The token ids of one text, or the ids themselves, checked against the vocabulary."""
    if isinstance(text, str):
        _require_characters(text)
        # Not the special tokens alone.
        text = transformer.need_tokenizer()(text)["input_ids"] if text else []
    elif isinstance(text, Tensor):
        text = text.tolist()
    try:
        ids = [int(token) for token in text]
    except (TypeError, ValueError) as error:
        raise BadText(f"cannot read {text!r:.60}; expected a text or token ids") from error
    if not ids:
        raise BadText("the text is empty; expected at least one token")
    known = vocabulary_size(transformer.model)
    if not all(0 <= token < known for token in ids):
        raise BadText(f"a token id is out of range; this model knows 0 to {known - 1}")
    return ids


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


def padded(transformer: "Transformer", texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Token ids padded on the right, and their mask."""
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), padding_id(transformer))
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def without_padding(transformer: "Transformer", ids: list[int]) -> list[int]:
    """The ids without padding tokens at their end, where the head reads the last position.

    Such heads look for the last token that is not the padding token; some texts end with it,
    because it is the end-of-text token too.
    """
    pooling, n = transformer.pooling, len(ids)
    pad = getattr(transformer.model.config.get_text_config(), "pad_token_id", None)
    if pooling is not None and pooling.number == LAST:
        while n > 1 and ids[n - 1] == pad:
            n -= 1
    return ids[:n]


def padding_id(transformer: "Transformer") -> int:
    """The id to pad with: the model's own, since some heads look for it, or the tokenizer's."""
    own = getattr(transformer.model.config.get_text_config(), "pad_token_id", None)
    theirs = getattr(transformer.tokenizer, "pad_token_id", None)
    # Some have a padding token for which the model has no embedding.
    known = (id_ for id_ in (own, theirs) if id_ is not None)
    return next((id_ for id_ in known if 0 <= id_ < vocabulary_size(transformer.model)), 0)


def _require_characters(text: str) -> None:
    """Refuse half a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode("utf8")
    except UnicodeEncodeError as error:
        raise BadText(
            f"character {error.start} of the text is half a surrogate pair "
            f"(U+{ord(text[error.start]):04X}), from wrongly decoded bytes; give valid Unicode"
        ) from error


@dataclass(frozen=True, eq=False)
class Order:
    """Where positions went when padding was moved to the right; both are (batch, pos)."""

    taken: Tensor  # by position of the pass, the position of the caller
    given: Tensor  # by position of the caller, the position of the pass

    def arrange(self, value: Tensor) -> Tensor:
        """From the caller's order to that of the pass."""
        return _reordered(value, self.taken)

    def restore(self, value: Tensor) -> Tensor:
        """From the order of the pass to the caller's."""
        return _reordered(value, self.given)


def _reordered(value: Tensor, order: Tensor) -> Tensor:
    rows = torch.arange(len(order), device=value.device)[:, None]
    return value[rows, order.to(value.device)]


def right_padded(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Order | None]:
    """The inputs with padding moved from the left to the right; None if there was none to move.

    Many families count positions from the first column, padding included, and would shift every
    position of a left-padded text. Padding on the right changes no position in any family, which
    law 'padding' verifies. Inputs with their own `position_ids` stay as they are.
    """
    arranged = dict(inputs)
    if inputs.get("position_ids") is not None:
        return arranged, None
    orders = {mask: _order(inputs.get(mask)) for mask in MASKED}
    for mask, order in orders.items():
        for name in (mask, *MASKED[mask]):
            if order is not None and isinstance(value := inputs.get(name), Tensor):
                arranged[name] = order.arrange(value)
    is_decoder = any(inputs.get(name) is not None for name in DECODER_INPUTS)
    return arranged, orders["decoder_attention_mask" if is_decoder else "attention_mask"]


def _order(mask: Any) -> Order | None:
    """How to move the padding of rows that begin with padding; other gaps are left alone."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    real = mask.bool()
    is_one_run = (real[:, 1:] & ~real[:, :-1]).sum(1) == 1
    moves = ~real[:, 0] & is_one_run
    if not moves.any():
        return None
    plain = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    taken = torch.where(moves[:, None], (~real).long().argsort(dim=1, stable=True), plain)
    return Order(taken, taken.argsort(dim=1))
