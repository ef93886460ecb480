"""Where two texts part, and how near a tie that was.

In: a prompt and what two ways of decoding wrote after it. Out: nothing if they are the same; else
the first token that differs, and how far apart the two candidates' scores were for the full model.

In narrow dtypes a pass over several tokens rounds otherwise than one over a single token. Where
two tokens are nearly tied, that can decide: a gap of a few roundings is a tie, a large one is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class Divergence:
    """The first token that differs."""

    place: int  # among the new tokens, from 0
    ours: int
    theirs: int
    gap: float  # between the logits of the two, as one pass over the text gives them
    rounding: float  # what one rounding of the larger of them amounts to

    def __str__(self) -> str:
        return (
            f"first differs at new token {self.place + 1}, where the two candidates' logits lie "
            f"{self.gap:.2g} apart ({self.gap / self.rounding:.1f} roundings)"
        )


@torch.no_grad()
def divergence(
    transformer: Transformer, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Divergence | None:
    """Where `ours` leaves `theirs`; None if one of them goes on where the other has ended.

    Args:
        transformer: the model.
        prompt: token ids that both follow.
        ours: new tokens.
        theirs: new tokens of the other text.
    """
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
