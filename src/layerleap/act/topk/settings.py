"""k for a model, a block or a head, and the other options of top-k attention, checked.

In: what a user gives. Out: a frozen value that tells k for every block.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

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
        if self.chunk < 1:
            raise BadSettings(f"chunk is {self.chunk}; expected at least 1 query at a time")
        for place, own in self.by_block.items():
            for one in [own] if isinstance(own, int) else own:
                if not isinstance(one, Integral) or isinstance(one, bool) or one < 1:
                    where = "" if place is None else f" of block {place}"
                    raise BadSettings(
                        f"k{where} is {one!r}; expected a whole number of keys, at least 1"
                    )
            if not isinstance(own, int) and not own:
                raise BadSettings("k is empty; expected one number per head")

    @property
    def by_block(self) -> Mapping[int | None, Ks]:
        """Every k by its block; under None, that of all blocks."""
        if isinstance(self.k, Mapping):
            return {block: own for block, own in self.k.items()}
        return {None: self.k}

    def k_of(self, block: int) -> Ks | None:
        """The k of a block, counted from 1; None for all keys."""
        known = self.by_block
        return known.get(block, known.get(None))

    @property
    def name(self) -> str:
        """A name of its own for every setting; readable where k is one number."""
        k = str(self.k)
        if not isinstance(self.k, int):
            plain = [[block, own if isinstance(own, int) else list(own)]
                     for block, own in sorted(self.by_block.items(), key=str)]  # fmt: skip
            k = hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]
        return f"layerleap-topk-{k}-{self.chunk}" + ("-recompute" if self.recompute else "")
