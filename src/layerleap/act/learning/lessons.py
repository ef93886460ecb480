"""What is to be learned: token ids, and how much the prediction of each of them counts.

In: demonstrations, or texts as token ids. Out: `Lesson`: a batch, the tokens to be predicted, and
their weights, which add up to 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText, ModelRefused, check_choice
from layerleap.models.inputs import padded
from layerleap.models.transformer import Transformer
from layerleap.short_repr import ShortRepr
from layerleap.stream.examples import longest_input

Tokens = Literal["all", "answer"]


@dataclass(frozen=True)
class Demonstration:
    """A solved example: the token ids of input and answer; the answer is at the end."""

    ids: tuple[int, ...]
    n_answer: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(int(token) for token in self.ids))
        if len(self.ids) < 2:
            raise BadText(
                f"a demonstration has {len(self.ids)} tokens; expected 2 or more, because the "
                "first is not predicted"
            )
        if not 1 <= self.n_answer < len(self.ids):
            raise BadSettings(
                f"n_answer is {self.n_answer}; expected 1 to {len(self.ids) - 1}, the tokens of "
                "the answer at the end of the demonstration"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Lesson(ShortRepr):
    """One batch, and the predictions that count.

    A row is a position whose next token is to be predicted, in row-major order.
    """

    inputs: dict[str, Any]
    keep: Tensor  # (batch, pos) True at the rows
    targets: Tensor  # (row,) the tokens that follow
    weights: Tensor  # (row,) float64, they add up to 1


def lesson(
    transformer: Transformer, texts: Sequence[Demonstration], tokens: Tokens = "all"
) -> Lesson:
    """A batch of demonstrations; every counted token of the batch has the same weight.

    Args:
        tokens: "all" counts every token but the first, as in the paper; "answer" only the answer.
    """
    check_choice(tokens, Tokens, "tokens")
    require_readable(transformer, [len(text.ids) for text in texts], "demonstration")
    inputs = padded(transformer, [text.ids for text in texts])
    keep = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    for row, text in enumerate(texts):
        first = 0 if tokens == "all" else len(text.ids) - 1 - text.n_answer
        keep[row, first : len(text.ids) - 1] = True
    following = inputs["input_ids"].roll(-1, 1)
    targets = following[keep]
    weights = torch.full((len(targets),), 1 / len(targets), dtype=torch.float64)
    return Lesson(inputs, keep, targets, weights)


def require_readable(transformer: Transformer, lengths: Sequence[int], noun: str) -> None:
    """Refuse models that do not learn here, no texts, and texts longer than the model reads."""
    require_learner(transformer)
    if not lengths:
        raise BadText(f"there are no {noun}s; expected at least one")
    if (longest := max(lengths)) > (limit := longest_input(transformer)):
        raise BadText(
            f"a {noun} has {longest} tokens; {transformer.identity.name} reads at most {limit}"
        )


def require_learner(transformer: Transformer) -> None:
    """Refuse models that do not predict the next token of one text."""
    is_pair = transformer.model.config.is_encoder_decoder
    if transformer.kind != "next-token" or is_pair:
        kind = "an encoder-decoder" if is_pair else f"a {transformer.kind} model"
        raise ModelRefused(
            f"{transformer.identity.name} is {kind}; learning here needs a decoder that predicts "
            "the next token"
        )
