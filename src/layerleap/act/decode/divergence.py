"""Where two texts diverge, and how close to a tie that was.

In: a prompt and what two ways of decoding wrote after it. Out: None if they are the same; else the
first token that differs, and the full model's gap between the two candidates.

In narrow dtypes a pass over several tokens rounds differently from a one-token pass, and can decide
between two tokens that are a few rounding steps apart. A larger gap is not rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class Divergence:
    """The first token that differs."""

    place: int  # index among the new tokens, from 0
    ours: int
    theirs: int
    gap: float  # between the logits of the two candidates in one pass over the text
    rounding: float  # one rounding step of the larger logit

    def __str__(self) -> str:
        return (
            f"first differs at new token {self.place + 1}, where the logits of the two candidates "
            f"are {self.gap:.2g} apart ({self.gap / self.rounding:.1f} rounding steps)"
        )


@torch.no_grad()
def divergence(
    transformer: Transformer, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Divergence | None:
    """Where two continuations of `prompt` first differ; None if one is a prefix of the other."""
    pairs = list(zip(ours, theirs, strict=False))
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return None
    ids = torch.tensor([[*prompt, *ours[:place]]])
    keep = torch.zeros_like(ids, dtype=torch.bool)
    keep[0, -1] = True
    last = transformer.n_layers
    h = transformer.capture({"input_ids": ids}, keep=keep, layers=[last]).states[last]
    logits = transformer.logits(h)[0]
    both = logits[[ours[place], theirs[place]]].double()
    step = torch.finfo(logits.dtype).eps * float(both.abs().max())
    return Divergence(place, *pairs[place], float((both[0] - both[1]).abs()), step)
