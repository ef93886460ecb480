"""What a model is given, as arguments of its forward pass.

In: prompts (see `models.prompts`), a tensor, or a batch of a tokenizer or processor.
Out: keyword arguments of the forward pass; and padding moved to the right, where no family's
positions can be wrong.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText, first_line
from layerleap.models.discovery.probe import accepts, vocabulary_size
from layerleap.models.discovery.tail import LAST
from layerleap.models.hooks.foreign import foreign_code
from layerleap.models.prompts import (
    as_pair,
    encode_all,
    encode_pair,
    inferred_mask,
    numbered,
    several,
)

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer

# By mask, the arguments that have the same positions.
MASKED = {
    "attention_mask": ("input_ids", "token_type_ids", "inputs_embeds"),
    "decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds"),
}
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")


def as_inputs(transformer: "Transformer", prompts: Any) -> dict[str, Any]:
    """Arguments of the forward pass for whatever form the input has.

    Args:
        transformer: the model; its tokenizer reads texts.
        prompts: one or several, as text, chat messages or token ids; for an encoder-decoder, a
            pair (source, target) or several; a tensor of token ids, pixels or sound features; or
            the arguments themselves, as a tokenizer or processor returns them.
    """
    if isinstance(prompts, Mapping) and "role" not in prompts:
        is_list = isinstance(prompts.get("input_ids"), list)  # without return_tensors
        if is_list and not transformer.model.config.is_encoder_decoder:
            return padded(transformer, several(transformer, prompts) or [])
        return dict(prompts)
    if isinstance(prompts, Tensor | np.ndarray):
        return _from_tensor(transformer, torch.as_tensor(prompts))
    return _from_prompts(transformer, prompts)


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


def _from_tensor(transformer: "Transformer", tensor: Tensor) -> dict[str, Any]:
    main = transformer.model.main_input_name
    if not tensor.numel():
        raise BadText("the tensor is empty; expected at least one token")
    if not tensor.is_floating_point() and tensor.dim() in (1, 2) and main == "input_ids":
        ids = tensor if tensor.dim() == 2 else tensor[None]
        is_one = tensor.dim() == 1
        mask = torch.ones_like(ids) if is_one else inferred_mask(transformer, ids)
        return {"input_ids": ids, "attention_mask": mask}
    if tensor.is_floating_point() and main != "input_ids":
        return {main: tensor}
    raise BadSettings(
        f"a tensor of {tuple(tensor.shape)} and {tensor.dtype} does not fit {main} of "
        f"{transformer.identity.name}; expected token ids of (batch, pos), or {main} by name: "
        f"{{{main!r}: tensor}}"
    )


def _from_prompts(transformer: "Transformer", prompts: Any) -> dict[str, Any]:
    is_prompt = isinstance(prompts, str) or (isinstance(prompts, Iterable) and bool(prompts))
    if not is_prompt:
        raise BadSettings(
            f"cannot read {prompts!r:.60}; expected a text, chat messages, token ids, a tensor, "
            "several of these, or a tokenizer's batch"
        )
    prompts = several(transformer, prompts) or [prompts]
    if not transformer.model.config.is_encoder_decoder:
        return padded(transformer, encode_all(transformer, prompts))
    pairs = []
    for number, prompt in enumerate(prompts, 1):
        with numbered(number, len(prompts)):
            pairs.append(encode_pair(transformer, *as_pair(transformer, prompt)))
    sources, targets = zip(*pairs, strict=True)
    return {
        **padded(transformer, sources),
        **{f"decoder_{name}": value for name, value in padded(transformer, targets).items()},
    }


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


def real_positions(
    transformer: "Transformer", arguments: Mapping[str, Any], shape: Sequence[int]
) -> Tensor:
    """(batch, pos) True at the positions of the stream that are not padding, on the CPU.

    The stream of an encoder-decoder is that of its decoder; a mask of the encoder says nothing.
    """
    prefix = "decoder_" if transformer.model.config.is_encoder_decoder else ""
    mask = arguments.get(f"{prefix}attention_mask")
    return mask.bool().cpu() if isinstance(mask, Tensor) else torch.ones(*shape[:2]).bool()


def padding_id(transformer: "Transformer") -> int:
    """The id to pad with: the model's own, since some heads look for it, or the tokenizer's."""
    owners = (transformer.model.config.get_text_config(), transformer.tokenizer)
    ids = (getattr(owner, "pad_token_id", None) for owner in owners)
    # Some have a padding token for which the model has no embedding.
    n_known = vocabulary_size(transformer.model)
    return next((id_ for id_ in ids if id_ is not None and 0 <= id_ < n_known), 0)


@dataclass(frozen=True, eq=False)
class Order:
    """Where positions went when padding was moved to the right; both are (batch, pos)."""

    caller: Tensor  # by position of the pass, the position of the caller
    in_pass: Tensor  # by position of the caller, the position of the pass

    def arrange(self, value: Tensor) -> Tensor:
        """From the caller's order to that of the pass."""
        return _reordered(value, self.caller)

    def restore(self, value: Tensor) -> Tensor:
        """From the order of the pass to the caller's."""
        return _reordered(value, self.in_pass)


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


def laid_out(model: Any, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Order | None]:
    """The inputs as a pass gets them: `right_padded`, unless others have put code on the model.

    A hook may look for the last column, so their padding stays where it is. Positions are then
    counted from the first real token, as `generate` does it.
    """
    arranged, order = right_padded(inputs)
    if order is None or not foreign_code(model):
        return arranged, order
    unmoved, mask = dict(inputs), inputs.get("attention_mask")
    if isinstance(mask, Tensor) and accepts(model, "position_ids"):
        unmoved["position_ids"] = (mask.long().cumsum(1) - 1).clamp_min(0)
    return unmoved, None


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
    caller = torch.where(moves[:, None], (~real).long().argsort(dim=1, stable=True), plain)
    return Order(caller, caller.argsort(dim=1))
