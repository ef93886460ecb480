"""The draft table: what follows each token, read through the layer-0 shortcut and cached.

In: a lens with a shortcut from layer 0. Out: for a token its most likely followers, with the
probabilities that the lens gives.

If h[0] contains no positions it depends on the current token alone, and so does its reading: a
table with one row per token is complete. Rows are computed on first use, several at a time, since
each costs a reading of the head. Models that add positions to h[0] are read at one position; the
table is then an approximation, which is good enough for drafts.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layerleap.act.decode.shortlist import Shortlist
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.lens import Lens
from layerleap.maps.bank import ShortcutBank
from layerleap.models.cursor.packed import LAYOUTS
from layerleap.models.discovery.probe import vocabulary_size
from layerleap.models.hooks.edit import unedited
from layerleap.models.transformer import Transformer

ONEDNN = LAYOUTS["onednn"]
PLACE = 8  # the position that tokens are read at if positions matter


class DraftTable:
    """Followers of tokens; `known` marks the rows that have been computed."""

    def __init__(self, lens: Lens, *, width: int = 8) -> None:
        """Start with no rows; the lens has a map from layer 0, and a row has `width` followers."""
        if not 1 <= width <= lens.transformer.d_vocab:
            raise BadSettings(
                f"width {width} of the draft table is out of range; expected 1 to "
                f"{lens.transformer.d_vocab}"
            )
        self.lens, self.width = lens, width
        # Heads are often padded, and so are some embeddings: only tokens of both can follow.
        self.size = min(lens.transformer.d_vocab, vocabulary_size(lens.transformer.model))
        self.ids, self.p, self.known = _rows(lens, width)
        h = self._states(torch.full((1, PLACE + 1), 1))
        ignores_positions = torch.equal(h[0], h[-1])
        self._length = 1 if ignores_positions else PLACE + 1
        self._head = _narrow_head(lens.transformer, self.size)

    def need(self, tokens: Iterable[int]) -> None:
        """Compute the rows of these tokens that are missing."""
        missing = sorted({t for t in tokens if t < self.size and not self.known[t]})
        if missing:
            self._compute(torch.tensor(missing))

    def of(self, token: int) -> tuple[list[int], list[float]]:
        """The followers of one token, most likely first, and their probabilities."""
        if token >= self.size:
            return [], []
        self.need([token])
        return self.ids[token].tolist(), self.p[token].tolist()

    @torch.no_grad()
    def _compute(self, tokens: Tensor) -> None:
        with unedited(self.lens.transformer.model):  # rows serve later texts too
            h = self._states(tokens[:, None].expand(-1, self._length))
        h = h[self._length - 1 :: self._length]
        if self._head is None:
            logits = self.lens.logits(h, 0).float()
        else:
            logits = self._head.logits(self.lens.map(0)(h)).float()
        best = logits[:, : self.size].topk(self.width)
        self.ids[tokens] = best.indices.cpu().int()
        self.p[tokens] = (best.values - logits.logsumexp(-1, keepdim=True)).exp().cpu()
        self.known[tokens] = True

    def _states(self, ids: Tensor) -> Tensor:
        """h[0] of every position: (batch x pos, d_model)."""
        keep = torch.ones_like(ids, dtype=torch.bool)
        return self.lens.transformer.capture({"input_ids": ids}, keep=keep, layers=[0]).states[0]


Rows = tuple[Tensor, Tensor, Tensor]  # ids, probabilities, and which are known
_ROWS: "WeakKeyDictionary[ShortcutBank, dict[Any, Rows]]" = WeakKeyDictionary()


def _rows(lens: Lens, width: int) -> Rows:
    """The rows that all tables of this model and bank fill in together."""
    size, key = lens.transformer.d_vocab, (lens.transformer.identity, width)
    shared = {} if lens.bank is None else _ROWS.setdefault(lens.bank, {})
    if key not in shared:
        ids, p = torch.zeros(size, width, dtype=torch.int32), torch.zeros(size, width)
        shared[key] = ids, p, torch.zeros(size, dtype=torch.bool)
    return shared[key]


Narrow = tuple[Tensor, Tensor | None, Tensor]  # weight, bias and the packed weight, in bfloat16
_NARROW: "WeakKeyDictionary[nn.Module, tuple[Any, Narrow]]" = WeakKeyDictionary()


def _narrowed(head: nn.Linear, size: int) -> Narrow:
    weight = head.weight.detach()[:size].bfloat16()
    bias = None if head.bias is None else head.bias.detach()[:size].bfloat16()
    return weight, bias, ONEDNN.pack(weight)


class _NarrowHead(Shortlist):
    """A copy of the head of a float32 model, in bfloat16: drafts need no more precision."""

    def _take_rows(self, head: nn.Linear) -> None:
        """The copy, made once for all tables."""
        weight, size = head.weight, len(self.ids)
        # A change that does not show here does no harm: drafts are verified.
        mark = weight.data_ptr(), 0 if weight.is_inference() else weight._version, size
        known = _NARROW.get(head)
        if known is None or known[0] != mark:
            known = _NARROW[head] = mark, _narrowed(head, size)
        self.weight, self.bias, self._packed = known[1]

    def _multiply(self, rows: Tensor) -> Tensor:
        narrow = rows.reshape(1, -1, rows.shape[-1]).bfloat16()
        product = ONEDNN.multiply(self._packed, self.weight, self.bias, narrow, narrow.shape[1])
        return product.view(*rows.shape[:-1], -1)


def _narrow_head(transformer: Transformer, size: int) -> _NarrowHead | None:
    """None if it would not be faster, or cannot be made."""
    model = transformer.model
    is_float = model.dtype == torch.float32 and model.device.type == "cpu"
    if is_float and ONEDNN.is_available(torch.bfloat16):
        with suppress(ModelRefused):  # a head that is not a plain linear layer
            return _NarrowHead(transformer, range(size))
    return None
