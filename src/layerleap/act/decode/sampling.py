"""The next token, chosen the way transformers' own `generate` chooses it.

In: logits of a position, and what `generate` has prepared: processors, criteria, a streamer.
Out: tokens, one at a time, each as soon as it is final.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]  # (1, n) ids, float32 (1, d_vocab) logits: scores


@dataclass(eq=False)
class TokenChooser:
    """One growing text. Random numbers are drawn once per token, in the order of tokens."""

    ids: Tensor  # (1, n) the text so far, including padding, which processors see too
    processor: Processor
    criteria: Callable[[Tensor, Any], Tensor]  # after each token: is the text finished?
    skip: int = 0  # padding tokens at its beginning
    sample: bool = False  # sample from the scores instead of taking the best
    streamer: Any = None  # receives each token
    scores: list[Tensor] | None = None  # of each token, if they are kept
    logits: list[Tensor] | None = None  # likewise
    is_finished: bool = False
    chosen: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        """The tokens so far, without padding."""
        return self.ids[0, self.skip :].tolist()

    def __call__(self, logits: Tensor, whole: Callable[[], Tensor] | None = None) -> int:
        """Choose the token after the position of these logits, and append it.

        `whole` returns the logits of the whole head, used if processors rule out every token of
        `logits`.
        """
        # Processors, criteria and streamers may be the user's own: they get normal tensors.
        with torch.inference_mode(False), torch.no_grad():
            return self._choose(logits, whole)

    def _choose(self, logits: Tensor, whole: Callable[[], Tensor] | None) -> int:
        raw = logits.clone().to(dtype=torch.float32, device=self.ids.device)[None]
        scores = self.processor(self.ids, raw.clone() if self.logits is not None else raw)
        if whole is not None and not scores.isfinite().any():
            return self._choose(whole(), None)
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(raw)
        if self.sample:
            token = torch.multinomial(scores.softmax(-1), num_samples=1)[0]
        else:
            token = scores.argmax(-1)
        self.ids = torch.cat([self.ids, token[None]], 1)
        if self.streamer is not None:
            self.streamer.put(token.cpu())
        scores_so_far = None if self.scores is None else tuple(self.scores)
        self.is_finished = bool(self.criteria(self.ids, scores_so_far).all())
        self.chosen.append(int(token))
        return self.chosen[-1]
