"""The parts of blocks that a map could stand in for: attention, FFN, and the norms around them.

In: a wrapped model. Out: for each kind, the couples of sites (what enters, what leaves) behind it.

A kind is given whole or not at all: where a block has no such part, or one whose output is not of
the width of its input, the reason is an error, so that no result rests on fewer parts than it says.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.probe import probe
from layerleap.models.transformer import Transformer

KINDS = ("attn", "ffn", "norms")


@dataclass(frozen=True, order=True)
class BlockPart:
    """What enters and what leaves one part of one block."""

    block: int  # 1 to n_layers
    part: str  # "attn", "ffn", or a norm: "attn_norm", "ffn_post", ...

    @property
    def sites(self) -> tuple[tuple[int, str], tuple[int, str]]:
        """As `see` wants them: what enters, what leaves."""
        return (self.block, f"{self.part}.in"), (self.block, f"{self.part}.out")

    @property
    def kind(self) -> str:
        """The kind it belongs to."""
        return self.part if self.part in KINDS else "norms"


def replaceable(
    transformer: Transformer, kinds: Iterable[str] = KINDS
) -> dict[str, tuple[BlockPart, ...]]:
    """For each kind the couples behind it, block after block; `ModelRefused` if it has none.

    "norms" are all norms around the parts of a block. A norm that serves two parts at once (as
    in many parallel blocks) is one couple, under the name that comes first.
    """
    kinds = check_kinds(kinds)
    found: dict[str, list[BlockPart]] = {kind: [] for kind in kinds}
    for block in range(1, transformer.n_layers + 1) if kinds else ():
        couples = _couples(transformer, block)
        for kind in kinds:
            own = [couple for couple in couples if couple.kind == kind]
            if not own:
                raise ModelRefused(
                    f"block {block} of {transformer.identity.name} has no {kind} to replace: its "
                    f"parts are {', '.join(couple.part for couple in couples)}; leave {kind} out"
                )
            found[kind] += own
    _check_widths(transformer, list(itertools.chain(*found.values())))
    return {kind: tuple(own) for kind, own in found.items()}


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds as a tuple, if they all exist."""
    kinds = tuple(kinds)
    for kind in kinds:
        if kind not in KINDS:
            raise BadSettings(f"parts {kind!r} are unknown; of {', '.join(KINDS)} were wanted")
    return kinds


def block_parts(transformer: Transformer, kinds: Iterable[str]) -> list[list[Any]]:
    """[block, part] of every couple of these kinds, block after block; plain JSON types."""
    found = replaceable(transformer, kinds)
    return [[c.block, c.part] for c in sorted(itertools.chain(*found.values()))]


def _couples(transformer: Transformer, block: int) -> list[BlockPart]:
    anatomy = transformer.anatomy[block - 1]
    if isinstance(anatomy, str):
        raise ModelRefused(
            f"the parts of block {block} of {transformer.identity.name} are not known ({anatomy}), "
            "so none can be replaced; its layers can still be read"
        )
    by_module: dict[tuple[str, str], BlockPart] = {}
    for name in anatomy.sites:
        part = name.rpartition(".")[0]
        paths = anatomy.sites[f"{part}.in"].path, anatomy.sites[f"{part}.out"].path
        # What cross-attention reads comes from elsewhere; a scale is linear as it is.
        if part != "cross" and not part.endswith("_scale"):
            by_module.setdefault(paths, BlockPart(block, part))
    return list(by_module.values())


def _check_widths(transformer: Transformer, couples: Sequence[BlockPart]) -> None:
    """A map between layers' widths can only stand in for a part that keeps the width."""
    if not couples:
        return
    wanted = [site for couple in couples for site in couple.sites]
    seen = transformer.capture(probe(transformer.model, rows=1), layers=[], sites=wanted)
    for couple in couples:
        before, after = (seen.sites[site].shape[-1] for site in couple.sites)
        if before != transformer.d_model or after != transformer.d_model:
            raise ModelRefused(
                f"{couple.part} of block {couple.block} of {transformer.identity.name} takes "
                f"{before} numbers and gives {after}; {transformer.d_model} and "
                f"{transformer.d_model} were wanted; leave {couple.kind} out"
            )
