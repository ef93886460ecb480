"""The options of top-k attention, checked: k for a model, a block or a head, and the others.

In: the arguments of `topk_attention`. Out: a frozen value with k for every block.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings

Ks = int | Sequence[int]  # for all heads of a block, or one for each
K = Ks | Mapping[int, Ks]  # for all blocks, or one for each


@dataclass(frozen=True)
class TopKSettings:
    """How top-k attention is computed.

    k is a number, one number per query head, or either of these by block: blocks that are not
    named keep all keys.
    """

    k: K
    chunk: int = 1024
    recompute: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "k", _checked_k(self.k))
        if self.chunk < 1:
            raise BadSettings(f"chunk is {self.chunk}; expected at least 1 query at a time")

    @property
    def blocks(self) -> list[int] | None:
        """The blocks that k names; None if it is for all of them."""
        return list(self.k) if isinstance(self.k, Mapping) else None

    def k_of(self, block: int) -> Ks | None:
        """The k of a block, counted from 1; None for all keys."""
        return self.k.get(block) if isinstance(self.k, Mapping) else self.k

    @property
    def most(self) -> int:
        """The largest k of any block and head."""
        by_block = self.k.values() if isinstance(self.k, Mapping) else [self.k]
        return max(max(ks) if isinstance(ks, Sequence) else ks for ks in by_block)

    @property
    def name(self) -> str:
        """A unique name for these settings; readable where k is one number."""
        k = str(self.k)
        if not isinstance(self.k, int):
            k = hashlib.sha256(json.dumps(self.k).encode()).hexdigest()[:12]
        return f"layerleap-topk-{k}-{self.chunk}" + ("-recompute" if self.recompute else "")


def _checked_k(k: Any) -> K:
    """The same k as a whole number, a tuple, or a dictionary of these in the order of blocks."""
    if not isinstance(k, Mapping):
        return _checked_ks(k, "k")
    if not k:
        raise BadSettings("k is empty; expected a number for some blocks")
    if strange := [b for b in k if not isinstance(b, int) or isinstance(b, bool) or b < 1]:
        raise BadSettings(f"k has block {strange[0]!r}; expected blocks by number, from 1")
    return {block: _checked_ks(k[block], f"k of block {block}") for block in sorted(k)}


def _checked_ks(ks: Any, name: str) -> Ks:
    several = isinstance(ks, Sequence) and not isinstance(ks, str)
    for one in ks if several else [ks]:
        if not isinstance(one, Integral) or isinstance(one, bool) or one < 1:
            raise BadSettings(f"{name} is {one!r}; expected a whole number of keys, at least 1")
    if several and not ks:
        raise BadSettings(f"{name} is empty; expected one number per head")
    return tuple(map(int, ks)) if several else int(ks)
