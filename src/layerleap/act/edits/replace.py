"""Parts of blocks replaced by their linear maps, in force inside a `with` block.

In: a wrapped model, a bank with maps of parts, which kinds to replace and from which layer on.
Out: the model as it then runs; or, from a recorded pass, the last states that it then ends with.

    attn    what attention adds to a position becomes a map of what enters it there
    ffn     the same for the FFN
    norms   every norm around the two becomes a matrix

Everything else runs as it is: residual additions, the other parts, the final norm. Maps were fitted
on what the untouched model computes, and here see what earlier maps made of it.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap
from layerleap.models.discovery.compare import rounding, row_gap
from layerleap.models.discovery.parts import KINDS, BlockPart, check_kinds, replaceable
from layerleap.models.discovery.probe import probe
from layerleap.models.discovery.trace import Shape, bare, shape_of, state_taken
from layerleap.models.hooks.recording import Recording, record
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class _Stand:
    """One place in the model where maps stand in: a shared block has one for all its layers."""

    kind: str
    takes: nn.Module  # what enters it enters the part
    gives: nn.Module  # what it returns is what the part gives; often the same module
    maps: dict[int, LinearMap]  # by block
    shape: Shape


@dataclass(eq=False)
class _Running:
    """Which block is running, and what entered its parts; shared by the hooks of one `with`."""

    start: int
    done: int = 0  # blocks entered since the pass began; tells apart the layers of a shared block
    block: int = 0
    entered: dict[int, Tensor] = field(default_factory=dict)  # by the stand's id

    def begin(self, layer: int) -> None:
        """The next block to run is the one that makes h[layer + 1]."""
        self.done = layer


class Replacement:
    """Which parts of a model can be replaced, prepared once; `of` puts some of them in force."""

    def __init__(self, transformer: Transformer, bank: ShortcutBank) -> None:
        bank.check_model(transformer)
        self.transformer, self.bank = transformer, bank.to(transformer.device)
        self.kinds = tuple(kind for kind in KINDS if self._has(kind))
        if not self.kinds:
            raise BadSettings(
                f"this bank of {bank.model['name']} has no maps of parts: fit it with parts=True"
            )
        couples = [c for own in replaceable(transformer, self.kinds).values() for c in own]
        self._stands = self._find_stands(couples)
        # Without attention no position hears of another: kept ones then need no company.
        self.is_local = self._is_alone() and self._agrees()

    def _has(self, kind: str) -> bool:
        """True if the bank has the maps of this kind; some of them would be worse than none."""
        named = {BlockPart(block, part) for block, part in self.bank.parts}
        if not any(couple.kind == kind for couple in named):
            return False
        missing = set(replaceable(self.transformer, [kind])[kind]) - named
        if missing:
            first = min(missing)
            raise BadSettings(
                f"this bank has maps of {kind}, but none of {first.part} of block {first.block}; "
                "fit it again"
            )
        return True

    def _find_stands(self, couples: Iterable[BlockPart]) -> list[_Stand]:
        found: dict[tuple[str, str], _Stand] = {}
        for couple in couples:
            block, anatomy = couple.block, self.transformer.sites(couple.block)
            path = self.transformer.blocks[block - 1]
            ends = tuple(f"{path}.{anatomy[site].path}" for _, site in couple.sites)
            takes, gives = (self.transformer.model.get_submodule(end) for end in ends)
            stand = found.setdefault(
                (ends[0], ends[1]), _Stand(couple.kind, takes, gives, {}, bare)
            )
            stand.maps[block] = self.bank.parts[block, couple.part]
        shapes = _shapes(self.transformer, [stand.gives for stand in found.values()])
        return [
            _Stand(stand.kind, stand.takes, stand.gives, stand.maps, shape)
            for stand, shape in zip(found.values(), shapes, strict=True)
        ]

    @contextmanager
    def of(self, kinds: Collection[str], *, start: int = 0) -> Iterator[_Running]:
        """Inside, the named kinds are replaced in every block after layer `start`.

        Everything is as it was on leaving, whatever happened in between.
        """
        self.require(kinds, start)
        running, model = _Running(start), self.transformer.model
        with ExitStack() as undo:
            handle = model.register_forward_pre_hook(lambda *_: running.begin(0))
            undo.callback(handle.remove)
            for path in dict.fromkeys(self.transformer.blocks):
                enter = partial(self._entering, running, path)
                handle = model.get_submodule(path).register_forward_pre_hook(enter)
                undo.callback(handle.remove)
            for stand in self._stands:
                if stand.kind in kinds:
                    _put(stand, running, undo)
            yield running

    def require(self, kinds: Collection[str], start: int = 0) -> None:
        """Refuse kinds that the bank has no maps of, and layers that do not exist."""
        for kind in check_kinds(kinds):
            if kind not in self.kinds:
                raise BadSettings(
                    f"this bank has no maps of {kind}, only of {', '.join(self.kinds)}; fit it "
                    "again with all parts"
                )
        if not 0 <= start <= self.transformer.n_layers:
            raise BadSettings(
                f"layer {start} does not exist: this model has layers 0 to "
                f"{self.transformer.n_layers}"
            )

    def _entering(self, running: _Running, path: str, *_: Any) -> None:
        """A block begins; one that serves many layers is told apart by counting."""
        running.done += 1
        blocks = self.transformer.blocks
        running.block = running.done if blocks.count(path) > 1 else blocks.index(path) + 1

    def _is_alone(self) -> bool:
        """True if replaced attention is never called: then nothing looks at masks or positions."""
        attention = [stand for stand in self._stands if stand.kind == "attn"]
        whole = all(stand.takes is stand.gives for stand in attention)
        blocks = range(1, self.transformer.n_layers + 1)
        crossed = any("cross.in" in self.transformer.sites(block) for block in blocks)
        return bool(attention) and whole and not crossed

    def _agrees(self) -> bool:
        """True if positions alone end as they do in company; tried, not believed."""
        recording = record(self.transformer, probe(self.transformer.model, rows=2, seed=21))
        keep = torch.ones(recording.states[0].shape[:2], dtype=torch.bool)
        keep[:, 0] = False  # so that no row stands where it would stand alone
        together = _together(self, recording, keep, ("attn",), 0)
        try:
            alone = _alone(self, recording, keep, ("attn",), 0)
        except RuntimeError:  # something else in the block wants the recorded shape
            return False
        return row_gap(alone, together) <= rounding(together)


def cascade(
    replacement: Replacement,
    recording: Recording,
    keep: Tensor,
    kinds: Collection[str],
    start: int,
) -> Tensor:
    """h[n_layers] at the kept positions, when every block after `start` runs with `kinds` replaced.

    Args:
        replacement: of the model that was recorded.
        recording: a clean pass; its states up to `start` are taken as they are.
        keep: boolean (batch, pos), in row-major order.
        kinds: which parts are replaced, at all positions; none gives the recorded rows to the bit.
        start: the layer from which on they are.
    """
    run = _alone if "attn" in kinds and replacement.is_local else _together
    return run(replacement, recording, keep, kinds, start)


def cascades(
    replacement: Replacement,
    recording: Recording,
    keep: Tensor,
    kinds: Collection[str],
    starts: Sequence[int],
) -> Iterator[Tensor]:
    """`cascade` from each of `starts`: in ascending order, and none of them the last layer."""
    if "attn" not in kinds or not replacement.is_local:
        for start in starts:
            yield _together(replacement, recording, keep, kinds, start)
        return
    # Rows alone want nothing that was recorded, so rows of all starts go through a block at once:
    # its weights are read from memory once, not once per start.
    rows = recording.rows(keep)
    h = rows[0][:0]
    with replacement.of(kinds) as running:
        for layer in range(starts[0], replacement.transformer.n_layers):
            if layer in starts:
                h = torch.cat([h.to(rows[layer].device), rows[layer]])
            running.begin(layer)
            h = recording.run(h.unsqueeze(1), layer, layer + 1).squeeze(1)
    yield from h.view(len(starts), -1, h.shape[-1])


def _together(
    replacement: Replacement,
    recording: Recording,
    keep: Tensor,
    kinds: Collection[str],
    start: int,
) -> Tensor:
    """All positions run, and the kept ones are taken in the end."""
    with replacement.of(kinds, start=start) as running:
        running.begin(start)
        h = recording.run(recording.states[start], start)
    return h[keep.to(h.device)]


def _alone(
    replacement: Replacement,
    recording: Recording,
    keep: Tensor,
    kinds: Collection[str],
    start: int,
) -> Tensor:
    """Kept positions run as texts of one position: far fewer, where texts are read at one place."""
    h = recording.states[start]
    with replacement.of(kinds, start=start) as running:
        running.begin(start)
        return recording.run(h[keep.to(h.device)].unsqueeze(1), start).squeeze(1)


def _put(stand: _Stand, running: _Running, undo: ExitStack) -> None:
    """Swap the forward of one module for the map; the module itself, its hooks and place stay."""
    module, apart = stand.gives, stand.takes is not stand.gives
    original = module.forward

    def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken = state_taken(args, kwargs)
        if taken is not None:
            running.entered[id(stand)] = taken

    def forward(*args: Any, **kwargs: Any) -> Any:
        if running.block <= running.start:
            return original(*args, **kwargs)
        taken = state_taken(args, kwargs)
        if taken is None:
            raise ModelRefused(f"{type(module).__name__} was called without a state to map")
        x = running.entered.pop(id(stand)) if apart else taken
        y = stand.maps[running.block](x)
        return stand.shape(y.reshape(*taken.shape[:-1], y.shape[-1]))

    if apart:
        undo.callback(stand.takes.register_forward_pre_hook(remember, with_kwargs=True).remove)
    # In the instance's own dictionary, where accelerate may keep a forward that must come back.
    own = module.__dict__
    if "forward" in own:
        undo.callback(own.__setitem__, "forward", own["forward"])
    else:
        undo.callback(own.pop, "forward")
    own["forward"] = forward


def _shapes(transformer: Transformer, modules: Collection[nn.Module]) -> list[Shape]:
    """How each module returns its state, seen in one pass over a probe."""
    seen: dict[int, Shape] = {}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        seen[id(module)] = shape_of(output, type(module).__name__)

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(note).remove)
        with torch.no_grad():
            transformer.model(**probe(transformer.model, rows=1))
    return [seen[id(module)] for module in modules]
