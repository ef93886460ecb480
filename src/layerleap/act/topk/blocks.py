"""Which rows and heads are computed at a time.

In: the shapes of queries and keys, and how many queries a chunk may have. Out: blocks that cover
every query of every head once. One block of scores is alive at a time: queries of a chunk times
keys, for as many heads as fit into a fixed number of scores, and for one at least.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

SCORES = 2**22  # scores of one block, where several heads can be computed together


@dataclass(frozen=True)
class Block:
    """Some texts, some heads of keys with all their heads of queries, one chunk of queries."""

    number: int
    texts: slice
    heads: slice  # of keys and values
    queries: slice
    n_keys: int  # the keys that some query of the chunk may see are among the first n_keys
    group: int  # heads of queries per head of keys

    @property
    def query_heads(self) -> slice:
        """The heads of queries that these heads of keys serve."""
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    def rows_of(self, query: Tensor) -> Tensor:
        """(text x head, group x query, width): the rows of (text, query head, query, width)."""
        rows = query[self.texts, self.query_heads, self.queries]
        n_heads = self.heads.stop - self.heads.start
        return rows.reshape(len(rows) * n_heads, -1, rows.shape[-1])

    def keys_of(self, key: Tensor) -> Tensor:
        """(text x head, key, width): the keys of (text, head, key, width), or values."""
        return key[self.texts, self.heads, : self.n_keys].flatten(0, 1)

    def per_head(self, rows: Tensor) -> Tensor:
        """(text, head, group, query, ...): rows of a block by head and query again."""
        n_heads = self.heads.stop - self.heads.start
        n_queries = self.queries.stop - self.queries.start
        return rows.unflatten(1, (self.group, n_queries)).unflatten(0, (-1, n_heads))

    def part_of(self, shared: Tensor) -> Tensor:
        """The part of (text or 1, query head or 1, query or 1, key), broadcast as `per_head`."""
        texts = self.texts if shared.shape[0] > 1 else slice(None)
        queries = self.queries if shared.shape[2] > 1 else slice(None)
        part = shared[texts, :, queries, : self.n_keys]
        if shared.shape[1] == 1:
            return part.unsqueeze(1)
        return part.unflatten(1, (-1, self.group))[:, self.heads]


def blocks_of(query: Tensor, key: Tensor, chunk: int, *, is_causal: bool) -> Iterator[Block]:
    """The blocks of (text, query head, query, width) and (text, head, key, width)."""
    n_texts, n_heads, n_keys = key.shape[:3]
    n_queries, group, number = query.shape[2], query.shape[1] // n_heads, 0
    for start in range(0, n_queries, chunk):
        stop = min(start + chunk, n_queries)
        n_visible = max(1, n_keys - n_queries + stop) if is_causal else n_keys
        fitting = max(1, SCORES // max(1, group * (stop - start) * n_visible))
        for texts, heads in _heads(n_texts, n_heads, fitting):
            yield Block(number, texts, heads, slice(start, stop), n_visible, group)
            number += 1


def _heads(n_texts: int, n_heads: int, fitting: int) -> Iterator[tuple[slice, slice]]:
    for text in range(0, n_texts, step := max(1, fitting // n_heads)):
        for head in range(0, n_heads, fitting):
            texts = slice(text, min(text + step, n_texts))
            yield texts, slice(head, min(head + fitting, n_heads))
