"""What is found out about a block's weights, once, or the reason why it cannot be.

In: a wrapped model and a block. Out: what a search for it gave, or `ModelRefused`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from layerleap.errors import ModelRefused
from layerleap.models.changes import Known
from layerleap.models.hooks.capture import check_block
from layerleap.models.transformer import Transformer

T = TypeVar("T")
Find = Callable[[int], T]  # for one block, or `ModelRefused`


class ByBlock(Generic[T]):
    """What is known of the blocks of all models; `search` prepares to find it for some blocks.

    Several blocks can share the passes that a search makes when it is called.
    """

    def __init__(self, search: Callable[[Transformer, Sequence[int]], Find[T]]) -> None:
        self._search, self._known = search, Known[dict[int, T | str]]()

    def of(self, transformer: Transformer, block: int) -> T:
        """What is known of block `block` (1 to n_layers), or `ModelRefused` with the reason."""
        check_block(transformer, block)
        entry = self._entries(transformer, [block])[block]
        if isinstance(entry, str):
            raise ModelRefused(entry)
        return entry

    def all(self, transformer: Transformer) -> dict[int, T | str]:
        """By block, what is known, or the reason why nothing is."""
        return self._entries(transformer, range(1, transformer.n_layers + 1))

    def _entries(self, transformer: Transformer, blocks: Iterable[int]) -> dict[int, T | str]:
        known = self._known.of(transformer, dict)
        if missing := [block for block in blocks if block not in known]:
            find = self._search(transformer, missing)
            for block in missing:
                try:
                    known[block] = find(block)
                except ModelRefused as error:
                    known[block] = str(error)  # not the error: its traceback holds the model
        return {block: known[block] for block in blocks}
