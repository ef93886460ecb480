"""The head restricted to likely tokens: a glance that costs a fraction of the whole.

In: a wrapped model and some token ids. Out: logits of these tokens alone, the same numbers that
the whole head gives for them. The exact head is then needed only where a row leaves, or not even
there, if a token outside the list may be missed.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.transformer import Transformer


class Shortlist:
    """Some rows of the unembedding, and the rest of the tail as it is."""

    def __init__(self, transformer: Transformer, ids: Iterable[int]) -> None:
        """Copies the rows, so that they lie together.

        Args:
            transformer: the model.
            ids: tokens; in the order of ids, as ties are broken.
        """
        self.transformer = transformer
        self.ids = torch.tensor(sorted(set(ids)), dtype=torch.long)
        if len(self.ids) < 2 or int(self.ids[0]) < 0 or int(self.ids[-1]) >= transformer.d_vocab:
            raise BadSettings(
                f"a shortlist of {len(self.ids)} tokens; at least 2 of 0 to "
                f"{transformer.d_vocab - 1} were wanted"
            )
        self._head = self._find_head()
        head = transformer.model.get_submodule(transformer.tail[self._head].path)
        assert isinstance(head, nn.Linear)
        rows = self.ids.to(head.weight.device)
        self.weight = head.weight.detach()[rows].contiguous()
        self.bias = None if head.bias is None else head.bias.detach()[rows]

    def _find_head(self) -> int:
        """Which step of the tail makes one number per token."""
        for at, step in enumerate(self.transformer.tail):
            module = self.transformer.model.get_submodule(step.path) if step.path else None
            if type(module) is nn.Linear and module.out_features == self.transformer.d_vocab:
                return at
        raise ModelRefused(
            f"the head of {self.transformer.identity.name} is no plain linear layer (quantised "
            "ones are not), so no rows of it can be taken; use the whole head"
        )

    @classmethod
    def common(cls, transformer: Transformer, texts: Iterable[list[int]], size: int) -> "Shortlist":
        """The tokens that stand most often in some texts of token ids."""
        counts = Counter(token for ids in texts for token in ids)
        return cls(transformer, [token for token, _ in counts.most_common(size)])

    def logits(self, h: Tensor) -> Tensor:
        """Of rows of h[n_layers]: (row, d_model) -> (row, len(ids))."""
        value = h.unsqueeze(1)
        for at, step in enumerate(self.transformer.tail):
            if at == self._head:
                value = nn.functional.linear(value.to(self.weight.device), self.weight, self.bias)
            else:
                value = self.transformer.apply(step, value)
        return value.reshape(len(h), len(self.ids))

    def spread(self, few: Tensor) -> Tensor:
        """Logits as wide as the vocabulary, from those of the list: other tokens cannot be.

        (row, len(ids)) -> (row, d_vocab)
        """
        made = few.new_full((len(few), self.transformer.d_vocab), -torch.inf)
        return made.index_copy_(1, self.ids.to(few.device), few)
