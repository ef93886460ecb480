"""How a model is fine-tuned: plain values, checked without a model and without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings

How = Literal["full", "layer-causal"]
Kind = Literal["adamw", "sgd"]
SHARE = 1 / 16  # of the rows, in layer-causal training: head and blocks then cost about the same
LEAST = {"steps": 1, "batch": 1, "max_tokens": 2, "check_every": 1, "tested_tokens": 0, "seed": 0}


@dataclass(frozen=True)
class FineTuning:
    """How a model is fine-tuned; plain values, written beside the result."""

    how: How = "layer-causal"
    parameters: tuple[str, ...] = ("blocks",)
    steps: int = 50
    learning_rate: float = 1e-5  # the peak: warmed up, then a cosine decay to 0
    optimizer: Kind = "adamw"
    decay: float = 0.01
    batch: int = 4  # windows per step
    max_tokens: int = 128  # tokens of a window
    share: float = 1.0  # of the rows whose losses below the last layer are computed
    check_every: int = 25  # steps between two measurements on held-out text
    tested_tokens: int = 2048  # of held-out text
    held_out: float = 0.25  # share of the documents that is never trained on
    seed: int = 0  # decides which documents are held out, and the order of the windows

    def __post_init__(self) -> None:
        check_fields(self)
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise BadSettings(f"{name} is {getattr(self, name)}; expected {least} or more")
        if not 0 < self.learning_rate < math.inf:
            raise BadSettings(f"learning_rate is {self.learning_rate}; expected a number above 0")
        if not 0 <= self.decay < math.inf:
            raise BadSettings(f"decay is {self.decay}; expected 0 or more")
        if not 0 <= self.held_out < 1:
            raise BadSettings(f"held_out is {self.held_out}; expected 0 or more and less than 1")
        check_share(self.how, self.share)


def fine_tuning(
    how: How, parameters: str | Sequence[str], share: float | None, **values: Any
) -> FineTuning:
    """The settings; a share of None is the default of the way of training."""
    words = (parameters,) if isinstance(parameters, str) else tuple(parameters)
    chosen = (SHARE if how == "layer-causal" else 1.0) if share is None else share
    return FineTuning(how, words, share=chosen, **values)


def check_share(how: str, share: float, *, has_lens: bool = False) -> None:
    """Refuse a share out of range, and options that plain training does not use."""
    if not 0 < share <= 1:
        raise BadSettings(f"share is {share}; expected more than 0 and at most 1")
    if how == "full" and (has_lens or share != 1.0):
        raise BadSettings("a lens and a share of the rows are for how='layer-causal' alone")
