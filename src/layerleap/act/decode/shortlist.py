"""The head restricted to likely tokens: a cheap reading.

In: a wrapped model and some token ids. Out: logits of these tokens alone, the same numbers that the
whole head gives for them. The whole head is then needed only where a row exits, or not even there
if tokens outside the list may be missed.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.transformer import Transformer


class Shortlist:
    """Some rows of the unembedding, with the rest of the tail unchanged."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, transformer: Transformer, ids: Iterable[int]) -> None:
        """Copy the rows, so that they are contiguous; `ids` are sorted to break ties as before."""
        self.transformer = transformer
        self.ids = torch.tensor(sorted(set(ids)), dtype=torch.long)
        if len(self.ids) < 2 or int(self.ids[0]) < 0 or int(self.ids[-1]) >= transformer.d_vocab:
            raise BadSettings(
                f"a shortlist of {len(self.ids)} tokens is not valid; expected at least 2 ids from "
                f"0 to {transformer.d_vocab - 1}"
            )
        for self._place, step in enumerate(transformer.tail):
            head = transformer.model.get_submodule(step.path) if step.path else None
            if type(head) is nn.Linear and head.out_features == transformer.d_vocab:
                self._take_rows(head)
                return
        raise ModelRefused(
            f"the head of {transformer.identity.name} is not a plain linear layer (quantised "
            "heads are not), so a shortlist cannot take rows from it; use the whole head"
        )

    def _take_rows(self, head: nn.Linear) -> None:
        rows = self.ids.to(head.weight.device)
        self.weight = head.weight.detach()[rows].contiguous()
        self.bias = None if head.bias is None else head.bias.detach()[rows]

    @classmethod
    def common(cls, transformer: Transformer, texts: Iterable[list[int]], size: int) -> "Shortlist":
        """The most frequent tokens of some texts, given as token ids."""
        counts = Counter(token for ids in texts for token in ids)
        return cls(transformer, [token for token, _ in counts.most_common(size)])

    def logits(self, h: Tensor) -> Tensor:
        """Logits of rows of h[n_layers]: (row, d_model) -> (row, len(ids))."""
        value = h.unsqueeze(1)
        for place, step in enumerate(self.transformer.tail):
            if place == self._place:
                value = self._multiply(value.to(self.weight.device))
            else:
                value = self.transformer.apply(step, value)
        return value.reshape(len(h), len(self.ids))

    def _multiply(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)

    def expand(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary, -inf outside the list: (row, ids) -> (row, d_vocab)."""
        whole = logits.new_full((len(logits), self.transformer.d_vocab), -torch.inf)
        return whole.index_copy_(1, self.ids.to(logits.device), logits)
