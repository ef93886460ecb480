"""Parts of blocks replaced by their linear maps.

In: a wrapped model, a bank with maps of parts, which kinds to replace and from which layer on.
Out: an edit for `model.edit`; or, from a recorded pass, the last states that the model ends with.

    attn    what attention adds at a position becomes a map of what enters it there
    ffn     the same for the FFN
    norms   every norm around the two becomes a matrix

Everything else runs as it is: residual additions, the other parts, the final norm. Maps were fitted
on the activations of the unedited model; here they get the output of earlier maps.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.map import Map
from layerleap.models.discovery.compare import rounding, row_gap
from layerleap.models.discovery.parts import KINDS, BlockPart, check_kinds, replaceable
from layerleap.models.discovery.probe import probe
from layerleap.models.discovery.trace import Shape, shape_of, state_taken
from layerleap.models.hooks.capture import check_layer
from layerleap.models.hooks.edit import Change, Edit, unedited
from layerleap.models.hooks.foreign import foreign_code
from layerleap.models.hooks.forward import Tap, once, tapped
from layerleap.models.hooks.recording import Recording, record
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class ReplaceParts(Edit):
    """Replace parts of every block after layer `start` by the linear maps of a bank.

        bank = ll.ShortcutBank.from_pretrained("bank")  # fitted with parts=True
        with model.edit(ll.edits.ReplaceParts(bank, kinds=["ffn"], start=12)):
            ...

    A replaced part is not computed. Without attention there are no keys and values, so replacing
    "attn" works only in passes without a cache.
    """

    bank: ShortcutBank = field(repr=False)
    kinds: Collection[str] | None = None  # of attn, ffn, norms; all that the bank has when None
    start: int = 0  # 0 to n_layers

    @property
    def skips_cache(self) -> bool:
        """True if attention is replaced, which stores keys and values."""
        kinds = {part if part in KINDS else "norms" for _, part in self.bank.parts}
        return "attn" in (kinds if self.kinds is None else self.kinds)

    def changes(self, transformer: Transformer) -> list[Change]:
        """At every part of these kinds."""
        return PartMaps(transformer, self.bank).changes(self.kinds, self.start)


@dataclass(frozen=True, eq=False)
class _Place:
    """One part of one block, and its map."""

    part: BlockPart
    takes: nn.Module  # what enters it enters the part
    gives: nn.Module  # its output is the part's output; often the same module
    map: Map
    shape: Shape

    def changes(self) -> list[Change]:
        block = self.part.block
        if self.takes is self.gives:
            return [Change(block, self.gives, "instead", self._run)]
        entered: list[Tensor] = []

        def remember(rows: Tensor, _: Any) -> tuple[Tensor, int]:
            entered[:] = [rows]
            return rows, 0

        return [
            Change(block, self.takes, "in", remember),
            Change(block, self.gives, "instead", partial(self._run, entered=entered)),
        ]

    def _run(self, *args: Any, entered: list[Tensor] | None = None, **kwargs: Any) -> Any:
        taken = state_taken(args, kwargs)
        if taken is None:
            raise ModelRefused(f"{type(self.gives).__name__} was called without a state to map")
        rows = self.map(taken if entered is None else entered.pop())
        return self.shape(rows.reshape(*taken.shape[:-1], rows.shape[-1]))


class PartMaps:
    """The maps of a bank and the parts of a model that they can replace, matched once."""

    def __init__(self, transformer: Transformer, bank: ShortcutBank) -> None:
        bank.check_model(transformer)
        self.transformer, self.bank = transformer, bank.to(transformer.device)
        mapped = {BlockPart(block, part) for block, part in bank.parts}
        self.kinds = tuple(kind for kind in KINDS if any(part.kind == kind for part in mapped))
        if not self.kinds:
            raise BadSettings(
                f"this bank of {bank.model['name']} has no maps of parts: fit it with parts=True"
            )
        with unedited(transformer.model):
            parts = replaceable(transformer, self.kinds)
            for kind, own in parts.items():
                if missing := set(own) - mapped:
                    first = min(missing)
                    raise BadSettings(
                        f"this bank has maps of {kind}, but none of {first.part} of block "
                        f"{first.block}; fit it again"
                    )
            self._places = self._find_places([part for own in parts.values() for part in own])

    def _find_places(self, parts: Sequence[BlockPart]) -> list[_Place]:
        modules = [self._modules(part) for part in parts]
        shapes = _shapes(self.transformer, {gives for _, gives in modules})
        return [
            _Place(part, takes, gives, self.bank.parts[part.block, part.part], shapes[gives])
            for part, (takes, gives) in zip(parts, modules, strict=True)
        ]

    def _modules(self, part: BlockPart) -> tuple[nn.Module, nn.Module]:
        block, sites = self.transformer.block(part.block), self.transformer.sites(part.block)
        takes, gives = (block.get_submodule(sites[site].path) for _, site in part.sites)
        return takes, gives

    def changes(self, kinds: Collection[str] | None, start: int) -> list[Change]:
        """The changes that replace `kinds` in every block after layer `start`."""
        kinds = self.kinds if kinds is None else kinds
        self.require(kinds)
        check_layer(self.transformer, start)
        return [
            change
            for place in self._places
            if place.part.kind in kinds and place.part.block > start
            for change in place.changes()
        ]

    def require(self, kinds: Collection[str]) -> None:
        """Refuse kinds that the bank has no maps of."""
        for kind in check_kinds(kinds):
            if kind not in self.kinds:
                raise BadSettings(
                    f"this bank has no maps of {kind}, only of {', '.join(self.kinds)}; fit it "
                    "again with all parts"
                )

    def replacing(self, kinds: Collection[str], start: int = 0) -> Edit:
        """The same edit as `ReplaceParts`, with the parts already matched."""
        return _MatchedParts(self, kinds, start)

    @property
    def is_local(self) -> bool:
        """True if, with attention replaced, positions do not depend on each other.

        Only the positions that are read then have to run. Hooks of others may look at all of them.
        """
        return self._runs_alone and not foreign_code(self.transformer.model)

    @once
    def _runs_alone(self) -> bool:
        return self._skips_attention() and self._agrees()

    def _skips_attention(self) -> bool:
        """True if replaced attention is never called: then masks and positions are not used."""
        attention = [place for place in self._places if place.part.kind == "attn"]
        is_whole = all(place.takes is place.gives for place in attention)
        blocks = range(1, self.transformer.n_layers + 1)
        has_cross = any("cross.in" in self.transformer.sites(block) for block in blocks)
        return bool(attention) and is_whole and not has_cross

    def _agrees(self) -> bool:
        """True if positions run alone end as they do together, on a probe."""
        with unedited(self.transformer.model):
            recording = record(self.transformer, probe(self.transformer.model, rows=2, seed=21))
        keep = torch.ones(recording.states[0].shape[:2], dtype=torch.bool)
        keep[:, 0] = False  # so that no row is at the position it has when it runs alone
        together = _together(self, recording, keep, ("attn",), 0)
        try:
            alone = _alone(self, recording, keep, ("attn",), 0)
        except RuntimeError:  # something else in the block needs the recorded shape
            return False
        return row_gap(alone, together) <= rounding(together)


@dataclass(frozen=True, eq=False)
class _MatchedParts(Edit):
    maps: PartMaps
    kinds: Collection[str]
    start: int

    def changes(self, transformer: Transformer) -> list[Change]:
        return self.maps.changes(self.kinds, self.start)


def cascades(
    maps: PartMaps,
    recording: Recording,
    keep: Tensor,
    kinds: Collection[str],
    starts: Sequence[int],
) -> Iterator[Tensor]:
    """For each start, h[n_layers] at the kept positions with `kinds` replaced in all blocks after.

    Args:
        maps: of the model that was recorded.
        recording: an unedited pass; its states up to each start are used as they are.
        keep: boolean (batch, pos), in row-major order.
        kinds: which parts are replaced, at all positions; none gives the recorded rows, bit for
            bit.
        starts: layers in ascending order.
    """
    is_pooled = maps.transformer.row_kind != "position"  # a row is then not a position
    if "attn" not in kinds or is_pooled or not maps.is_local:
        for start in starts:
            yield _together(maps, recording, keep, kinds, start)
        return
    # Independent rows need nothing that was recorded, so rows of all starts go through a block at
    # once: its weights are read from memory once, not once per start.
    rows = recording.rows(keep)
    h = rows[0][:0]
    with maps.transformer.edit(maps.replacing(kinds)):
        for layer in range(starts[0], maps.transformer.n_layers + 1):
            if len(h):
                h = recording.run(h.unsqueeze(1), layer - 1, layer).squeeze(1)
            if layer in starts:
                h = torch.cat([h.to(rows[layer].device), rows[layer]])
    yield from h.view(len(starts), -1, h.shape[-1])


def _together(
    maps: PartMaps, recording: Recording, keep: Tensor, kinds: Collection[str], start: int
) -> Tensor:
    """All positions run, and the kept ones are taken in the end."""
    with maps.transformer.edit(maps.replacing(kinds, start)):
        h = recording.run(recording.states[start], start)
    return maps.transformer.rows(h, keep)


def _alone(
    maps: PartMaps, recording: Recording, keep: Tensor, kinds: Collection[str], start: int
) -> Tensor:
    """Only the kept positions run, as texts of one position: far fewer rows."""
    h = recording.states[start]
    with maps.transformer.edit(maps.replacing(kinds, start)):
        return recording.run(h[keep.to(h.device)].unsqueeze(1), start).squeeze(1)


@torch.no_grad()
def _shapes(transformer: Transformer, modules: Collection[nn.Module]) -> dict[nn.Module, Shape]:
    """How each module returns its state, from one pass over a probe."""
    shapes: dict[nn.Module, Shape] = {}

    def note(module: nn.Module, output: Any) -> None:
        shapes[module] = shape_of(output, type(module).__name__)

    taps = {module: Tap(see_output=partial(note, module)) for module in modules}
    with tapped(transformer.model, taps):
        transformer.model(**probe(transformer.model, rows=1))
    return shapes
