"""The parts of blocks that a map can replace: attention, FFN, and the norms around them.

In: a wrapped model. Out: for each kind, the parts of all blocks that belong to it.

A kind is returned whole or not at all: if a block has no such part, or one whose output and input
differ in width, that is an error, so that no result covers fewer parts than it claims.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from layerleap.errors import ModelRefused, check_choice
from layerleap.models.discovery.probe import probe
from layerleap.models.transformer import Transformer

KINDS = ("attn", "ffn", "norms")


@dataclass(frozen=True, order=True)
class BlockPart:
    """One part of one block."""

    block: int  # 1 to n_layers
    part: str  # "attn", "ffn", or a norm: "attn_norm", "ffn_post", ...

    @property
    def sites(self) -> tuple[tuple[int, str], tuple[int, str]]:
        """Its input and its output, as `capture` takes them."""
        return (self.block, f"{self.part}.in"), (self.block, f"{self.part}.out")

    @property
    def kind(self) -> str:
        """The kind it belongs to."""
        return self.part if self.part in KINDS else "norms"


def replaceable(
    transformer: Transformer, kinds: Iterable[str] = KINDS
) -> dict[str, tuple[BlockPart, ...]]:
    """The parts of each kind, block after block; `ModelRefused` if a block has none.

    "norms" are all norms around the parts of a block. A norm that serves two parts at once (as
    in many parallel blocks) is listed once, under the name that comes first.
    """
    kinds = check_kinds(kinds)
    by_kind: dict[str, list[BlockPart]] = {kind: [] for kind in kinds}
    for block in range(1, transformer.n_layers + 1) if kinds else ():
        parts = _parts(transformer, block)
        for kind in kinds:
            members = [part for part in parts if part.kind == kind]
            if not members:
                raise ModelRefused(
                    f"block {block} of {transformer.identity.name} has no {kind} to replace: its "
                    f"parts are {', '.join(part.part for part in parts)}; leave {kind} out"
                )
            by_kind[kind] += members
    _check_widths(transformer, list(itertools.chain(*by_kind.values())))
    return {kind: tuple(members) for kind, members in by_kind.items()}


def check_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    """The kinds as a tuple, if they all exist."""
    kinds = tuple(kinds)
    for kind in kinds:
        check_choice(kind, KINDS, "the kind of parts")
    return kinds


def block_parts(transformer: Transformer, kinds: Iterable[str]) -> list[list[Any]]:
    """[block, part] of every part of these kinds, block after block; plain JSON types."""
    parts = replaceable(transformer, kinds)
    return [[p.block, p.part] for p in sorted(itertools.chain(*parts.values()))]


def _parts(transformer: Transformer, block: int) -> list[BlockPart]:
    consequence = "none can be replaced; its layers can still be read"
    anatomy = transformer.known_anatomy(block, consequence)
    by_module: dict[tuple[str, str], BlockPart] = {}
    for name in anatomy.sites:
        part = name.rpartition(".")[0]
        paths = anatomy.sites[f"{part}.in"].path, anatomy.sites[f"{part}.out"].path
        # Cross-attention reads from another model; a scale is linear already.
        if part != "cross" and not part.endswith("_scale"):
            by_module.setdefault(paths, BlockPart(block, part))
    return list(by_module.values())


def _check_widths(transformer: Transformer, parts: Sequence[BlockPart]) -> None:
    """A map between states can only replace a part that takes and gives the width of a state."""
    if not parts:
        return
    sites = [site for part in parts for site in part.sites]
    captured = transformer.capture(probe(transformer.model, rows=1), layers=[], sites=sites)
    for part in parts:
        before, after = (captured.sites[site].shape[-1] for site in part.sites)
        if {before, after} != {transformer.d_model}:
            raise ModelRefused(
                f"{part.part} of block {part.block} of {transformer.identity.name} takes {before} "
                f"numbers and gives {after}; expected {transformer.d_model} for both; leave "
                f"{part.kind} out"
            )
