"""The next token, chosen as the library's own `generate` chooses it.

In: logits of a position, and what `generate` has prepared: processors, criteria, a streamer.
Out: tokens, one at a time, each as soon as it is certain.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]


class TokenChooser:
    """One text as it grows. Random numbers are drawn once per token, in the order of tokens."""

    def __init__(
        self,
        ids: Tensor,
        *,
        skip: int = 0,
        processor: Processor,
        criteria: Callable[[Tensor, Any], Tensor],
        sample: bool = False,
        streamer: Any = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        """Nothing chosen yet.

        Args:
            ids: (1, n) the text so far, padding included: processors are shown it too.
            skip: tokens at its beginning that are padding.
            processor: from (1, n) and float32 (1, d_vocab) to scores.
            criteria: says after each token whether the text is finished.
            sample: draw from the scores instead of taking the best.
            streamer: given each token.
            keep_scores: remember the scores of each token.
            keep_logits: remember its logits too.
        """
        self.ids, self.skip, self.processor, self.criteria = ids, skip, processor, criteria
        self.sample, self.streamer = sample, streamer
        self.scores: list[Tensor] | None = [] if keep_scores else None
        self.logits: list[Tensor] | None = [] if keep_logits else None
        self.is_finished = False
        self.chosen: list[int] = []

    @property
    def text(self) -> list[int]:
        """The tokens so far, without padding."""
        return self.ids[0, self.skip :].tolist()

    def __call__(self, logits: Tensor, whole: Callable[[], Tensor] | None = None) -> int:
        """The token that follows; it is appended.

        Args:
            logits: of the position before it.
            whole: gives better ones, should processors leave none of these a chance.
        """
        # Processors, criteria and streamers are other people's: they get plain tensors.
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
        shown = None if self.scores is None else tuple(self.scores)
        self.is_finished = bool(self.criteria(self.ids, shown).all())
        self.chosen.append(int(token))
        return self.chosen[-1]
