"""One prompt with the position that is looked at.

In: anything a model reads, and a position. Out: arguments of the forward pass, a label for every
position, and the mask of the positions whose state reaches the logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.lens.lens import Lens
from layerleap.lens.vocabulary.tokens import token_label
from layerleap.models.inputs import as_inputs, padded, without_padding
from layerleap.models.prompts import encode, several
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import require_length


@dataclass(frozen=True, eq=False)
class OneInput:
    """One text, pair of texts, image or sound, and where to look."""

    inputs: dict[str, Any]
    tokens: tuple[str, ...]  # a label for each position
    position: int
    keep: Tensor  # (1, pos): the position; where a head pools, all that it pools

    @classmethod
    def of(cls, transformer: Transformer, prompt: Any, position: int | None = None) -> "OneInput":
        """By default the last position that a lens reads: the last token, or the last mask."""
        inputs = _inputs(transformer, prompt)
        is_decoder = transformer.model.config.is_encoder_decoder
        ids = inputs.get("decoder_input_ids" if is_decoder else "input_ids")
        if any(len(v) != 1 for v in inputs.values() if isinstance(v, Tensor)):
            raise BadSettings("got a batch of several inputs; expected one at a time")
        if ids is not None:
            known = torch.as_tensor(ids)[0].tolist()
            tokens = tuple(token_label(transformer, token).label for token in known)
        else:  # only the model knows into how many patches it cuts an image
            known = [-1] * transformer.capture(inputs, layers=[0]).states[0].shape[1]
            tokens = tuple(f"p{place}" for place in range(len(known)))
        n, read = len(tokens), Lens(transformer).positions(known)
        if ids is not None:
            require_length(transformer, n)
        place = read[-1] if position is None else position
        if not -n <= place < n:
            raise BadSettings(f"position {place} does not exist: the text has {n} tokens")
        place %= n
        if transformer.pooling is not None and place not in read:
            raise BadSettings(
                f"{transformer.identity.name} classifies whole inputs, from position "
                f"{', '.join(map(str, read))}: omit position"
            )
        keep = torch.zeros(1, n, dtype=torch.bool)
        keep[0, read if transformer.pooling is not None else place] = True
        return cls(inputs, tokens, place, keep)


def _inputs(transformer: Transformer, prompt: Any) -> dict[str, Any]:
    config = transformer.model.config
    if transformer.model.main_input_name != "input_ids" or config.is_encoder_decoder:
        return as_inputs(transformer, prompt)
    if isinstance(prompt, Mapping) and "role" not in prompt and len(prompt) > 2:
        return as_inputs(transformer, prompt)  # more than ids and their mask
    prompts = several(transformer, prompt)
    if prompts is not None and len(prompts) != 1:
        raise BadSettings(f"got {len(prompts)} prompts; expected one at a time")
    one = prompt if prompts is None else prompts[0]
    return padded(transformer, [without_padding(transformer, encode(transformer, one))])
