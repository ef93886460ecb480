"""Keys that can matter for one query, found from a summary of pages of keys (Quest).

In: the keys of a long cache, and a query. Out: the keys of the pages with the highest upper bounds.
Only these are scored, so a step of decoding reads a small part of the cache.

A page is `size` consecutive keys; its summary is the least and the greatest value of each
coordinate. The product of a query with any key of the page is at most the sum, over coordinates, of
the query times whichever of the two is larger. Keys after the last whole page are always scored.

A key that is in no chosen page is missed, however high its score: the selection is approximate.
A summary is carried over to the next pass only if the cache still holds the very tensor that was
summarised, unchanged, when that pass begins; a cache that was cropped, reordered or replaced is
summarised again.
"""

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from layerleap.act.topk.masks import is_hidden
from layerleap.arguments import check_fields
from layerleap.errors import BadSettings


@dataclass(frozen=True)
class Pages:
    """Score only the keys of the `keep` pages that can have the highest scores."""

    size: int = 32  # keys per page
    keep: int = 32  # pages that are scored, for each head of keys

    @property
    def n_keys(self) -> int:
        """How many keys are scored, besides those after the last page."""
        return self.size * self.keep

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("size", "keep"):
            if getattr(self, name) < 1:
                raise BadSettings(f"{name} of pages is {getattr(self, name)}; expected at least 1")


class PagedKeys:
    """The summary of the keys of one attention module, kept up to date while a cache grows."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.n_summarised = 0  # keys that were summarised, over all passes
        self._bounds: Tensor | None = None  # (text, head, page, least and greatest values)
        self._summarised: Any = None  # the keys that were summarised, weakly, and their version
        self._layer: Any = None  # of the cache, if it holds these keys unchanged

    def begin(self, cache: Any) -> None:
        """Note, before a pass, whether the cache holds what was summarised."""
        if getattr(cache, "cursor", None) is not None:
            raise BadSettings(
                "page selection is for passes over one token, and the decoders of this package "
                "run several; use decoder='transformers', or TopKAttention without pages"
            )
        self._layer = None
        keys, version = (
            (None, 0) if self._summarised is None else (self._summarised[0](), self._summarised[1])
        )
        if keys is None or keys._version != version:
            return
        for layer in getattr(cache, "layers", ()):
            if type(layer) is DynamicLayer and layer.keys is keys:
                self._layer = layer

    def narrow(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and mask of the pages that can matter, and of the keys after the last page.

        A pass over several queries, and one over few keys, gets all of them. Shapes are those of
        `topk_attend`. The mask, (text or 1, 1, query, key), is boolean, or float with 0 where a key
        is visible, or None if all are.
        """
        n_pages = key.shape[2] // self.pages.size
        if query.shape[2] > 1 or n_pages <= self.pages.keep:
            return key, value, mask
        mask = None if mask is None else _boolean(mask)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        numbers = self._numbers(query, key, mask, n_pages, scaling)
        if mask is not None:
            mask = mask.expand(*numbers.shape[:2], 1, -1).gather(-1, numbers[:, :, None])
            mask = mask.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return _at(key, numbers), _at(value, numbers), mask

    def _numbers(
        self, query: Tensor, key: Tensor, mask: Tensor | None, n_pages: int, scaling: float
    ) -> Tensor:
        """(text, head, candidate): numbers of the keys to score."""
        size, device = self.pages.size, key.device
        bounds = _bounds(query, self._summary(key, n_pages)) * scaling
        bounds = bounds.to(torch.promote_types(bounds.dtype, torch.float32))
        if mask is not None:
            is_visible = mask[..., : n_pages * size].unflatten(-1, (n_pages, size)).any(-1)
            bounds = bounds.masked_fill(~is_visible, torch.finfo(bounds.dtype).min)
        # Query heads that share keys have as many votes as they would have attention, at most.
        # Logarithms: pages far below the best one would otherwise all have no votes, and tie.
        votes = bounds.log_softmax(-1).logsumexp(2)
        best = votes.topk(self.pages.keep, -1, sorted=False).indices
        inside = best[..., None] * size + torch.arange(size, device=device)
        rest = torch.arange(n_pages * size, key.shape[2], device=device)
        return torch.cat([inside.flatten(2), rest.expand(*best.shape[:2], -1)], -1)

    def _summary(self, key: Tensor, n_pages: int) -> Tensor:
        """Least and greatest values of whole pages; those known are not computed again."""
        is_grown = self._layer is not None and self._layer.keys is key
        known, size = self._bounds if is_grown else None, self.pages.size
        n_known = 0 if known is None else known.shape[2]
        if known is None or n_known < n_pages:
            new = key[:, :, n_known * size : n_pages * size].unflatten(2, (-1, size))
            bounds = torch.cat([new.amin(3), new.amax(3)], -1)
            known = bounds if known is None else torch.cat([known, bounds], 2)
            self.n_summarised += new.shape[2] * size
        self._bounds = known
        # Tensors of inference mode have no version that would show a change.
        self._summarised = None if key.is_inference() else (ref(key), key._version)
        return known


def _boolean(mask: Tensor) -> Tensor:
    """A mask that says which keys are visible and nothing else."""
    hidden = ~mask if mask.dtype == torch.bool else is_hidden(mask)
    if mask.shape[1] > 1 or not (hidden | (mask == 0) | (mask.dtype == torch.bool)).all():
        raise BadSettings(
            "page selection needs a mask of visible keys that all heads share; this model adds "
            "biases to scores, so use TopKAttention without pages"
        )
    return ~hidden


def _bounds(query: Tensor, summary: Tensor) -> Tensor:
    """(text, head, group, page): upper bounds on the products with the keys of a page."""
    rows = query.squeeze(2).unflatten(1, (summary.shape[1], -1))
    return torch.cat([rows.clamp_max(0), rows.clamp_min(0)], -1) @ summary.mT


def _at(tensor: Tensor, numbers: Tensor) -> Tensor:
    """(text, head, candidate, width): the rows of (text, head, key, width) with these numbers."""
    n_texts, n_heads, n_keys, width = tensor.shape
    first = torch.arange(n_texts * n_heads, device=tensor.device) * n_keys
    places = (numbers + first.view(n_texts, n_heads, 1)).flatten()
    rows = tensor.reshape(-1, width).index_select(0, places)
    return rows.view(*numbers.shape, width)
