"""Top tokens of vectors as sets of ids, and how much two sets share.

In: vectors and the output matrix E, (d_vocab, d_model). Out: (vector, k) ids, and Jaccard indices.
Scores over the vocabulary are held for a few vectors at a time.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Order = Literal["magnitude", "high", "low"]
ORDERS: dict[Order, Callable[[Tensor], Tensor]] = {
    "magnitude": Tensor.abs,
    "high": lambda scores: scores,
    "low": Tensor.neg,
}
# Which tokens of a vector count, and whether norms are folded in.
READINGS: dict[str, tuple[Order, bool]] = {
    "plain": ("magnitude", False),
    "signed": ("high", False),
    "folded": ("magnitude", True),
}
ENTRIES = 2**24  # scores held at a time: 64 MB in float32


@torch.no_grad()
def top_ids(vectors: Tensor, matrix: Tensor, k: int, *orders: Order) -> dict[Order, Tensor]:
    """The k best tokens of every vector in each order: (vector, k) ids, int32, best first."""
    parts_of: dict[Order, list[Tensor]] = {order: [] for order in orders}
    for part in vectors.to(matrix).split(max(1, ENTRIES // len(matrix))):
        scores = part @ matrix.T
        for order in orders:
            # `torch.topk` is the fastest here; ties, whose order it does not define, are rare.
            parts_of[order].append(ORDERS[order](scores).topk(k, dim=1).indices.int().cpu())
    empty = torch.empty(0, k, dtype=torch.int32)
    return {order: torch.cat([empty, *parts]) for order, parts in parts_of.items()}


def jaccard(a: Tensor, b: Tensor) -> Tensor:
    """|A and B| / |A or B| of each row: two (row, k) of ids, no id twice in a row -> (row,)."""
    both = torch.cat([a, b], dim=1).sort(dim=1).values
    shared = (both[:, 1:] == both[:, :-1]).sum(1).double()
    return shared / (both.shape[1] - shared)


def found_among(wanted: Tensor, given: Tensor) -> Tensor:
    """The share of wanted ids that are among the given: (row, k), (row, n) -> (row,)."""
    ordered = given.sort(dim=1).values
    place = torch.searchsorted(ordered, wanted.contiguous()).clamp_max(given.shape[1] - 1)
    return (ordered.gather(1, place) == wanted).double().mean(1)


def derangement(n: int, generator: torch.Generator) -> Tensor:
    """A random permutation that moves everything: one cycle through all n, which are 2 or more."""
    order = torch.randperm(n, generator=generator)
    partner = torch.empty_like(order)
    partner[order] = order.roll(1)
    return partner


def others(documents: Tensor, generator: torch.Generator) -> Tensor:
    """For every row, a random row of another document; there are two documents or more."""
    order = documents.argsort(stable=True)
    ordered = documents[order]
    first = torch.searchsorted(ordered, documents)
    size = torch.searchsorted(ordered, documents, right=True) - first
    free = len(documents) - size
    drawn = (torch.rand(len(documents), generator=generator, dtype=torch.float64) * free).long()
    return order[torch.where(drawn < first, drawn, drawn + size)]
