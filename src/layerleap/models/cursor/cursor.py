"""The model run over a cache, each position as far as it is wanted.

In: a wrapped decoder, and tokens as they come, one after another or as a tree.
Out: states at the layer where a pass ended; keys and values right for everything that is kept.

Positions may wait at a layer: what lies above is run later, in one pass with the positions that
follow. Layers of the cache then differ in length, but a position never waits higher than the one
before it, so what a block has yet to see is always the end of the text.

The model's own forward pass does the work. It is told that the text goes on from its shortest
layer, so masks, positions and biases come out as that family makes them, and each block gets the
rows of them that it lacks. Which arguments have a row per position is found, not known (`axes`).
"""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.cursor.axes import Axes, BlockArguments, Placement, along
from layerleap.models.cursor.cache import KeysStored, RaggedCache
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.tree import Tree
from layerleap.models.discovery.probe import accepts
from layerleap.models.discovery.trace import Shape, shape_of, state_given, state_place
from layerleap.models.transformer import Transformer

# A layer, the new rows of h[layer - 1] and of h[layer]: is that far enough?
StopCheck = Callable[[int, Tensor, Tensor], bool]
Carry = Callable[[Tensor, int, int], Tensor]  # rows of h[src], src, dst: what to take for h[dst]


# One walk at a time: a second one on another thread waits for the first to leave the model.
_LOCKS: "WeakKeyDictionary[nn.Module, threading.RLock]" = WeakKeyDictionary()


class _Enough(Exception):
    """Raised inside the model once nothing above is wanted."""


@dataclass(frozen=True, eq=False)
class PassEnd:
    """Where a pass ended: h[layer] of the last len(h) positions, (row, d_model)."""

    layer: int
    h: Tensor


class Cursor:
    """One text under way; inside its `with` block, the blocks of the model obey it.

    The model is as before on leaving. After an error or an interruption, so is the walk: a pass
    counts as a whole or not at all.
    """

    def __init__(
        self,
        transformer: Transformer,
        axes: Axes | None = None,
        *,
        packed: Packed | None = None,
    ) -> None:
        """An empty text.

        Args:
            transformer: a decoder.
            axes: from `walkable.find_axes`; without them nothing can wait or branch.
            packed: weights laid out for passes over a few tokens.
        """
        self.transformer, self.axes = transformer, axes
        self._packed = packed
        self.cache = RaggedCache(transformer.n_layers)
        self.ids: list[int] = []  # tokens whose positions were entered
        self.called: list[BlockArguments] = []  # what the blocks of the last pass were called with
        self._waiting: dict[int, Tensor] = {}  # by layer: (1, row, d_model)
        self._shapes: dict[int, Shape] = {}
        self._undo = ExitStack()
        self._thread: int | None = None  # on which a pass is under way
        self._takes_positions = accepts(transformer.model, "position_ids")

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:  # nobody calls __exit__ for a `with` that was not entered
            self._undo.close()
            raise
        return self

    def _enter(self) -> None:
        model = self.transformer.model
        self._undo.enter_context(_LOCKS.setdefault(model, threading.RLock()))
        if self._packed is not None:
            self._undo.enter_context(self._packed.on())
        for path in dict.fromkeys(self.transformer.blocks):
            own = model.get_submodule(path).__dict__
            # In the instance's own dictionary, where accelerate may keep a forward already.
            original = model.get_submodule(path).forward
            if "forward" in own:
                self._undo.callback(own.__setitem__, "forward", own["forward"])
            else:
                self._undo.callback(own.pop, "forward")
            own["forward"] = partial(self._forward, original)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @property
    def length(self) -> int:
        """How many positions were entered."""
        return len(self.ids)

    @property
    def waiting(self) -> int:
        """How many positions at the end have not reached the last layer."""
        return self.length - self.cache.layers[-1].length

    @torch.no_grad()
    def run(
        self,
        new: Sequence[int] | Tree,
        *,
        watch: StopCheck | None = None,
        checks: Collection[int] = (),
        carry: Carry | None = None,
    ) -> PassEnd:
        """Enter new tokens, and run whatever waits along with them.

        Args:
            new: tokens that follow the text; none to only run what waits.
            watch: asked at the layers `checks` whether to stop there; if so, everything that is
                under way waits there.
            checks: layers below the last.
            carry: instead of waiting, the new rows leave, and their keys and values in the
                blocks above are made from what this gives.
        """
        tree = new if isinstance(new, Tree) else Tree.chain(new) if new else None
        if tree is not None and not tree.is_chain and (self.waiting or watch):
            raise BadSettings("a tree cannot be entered while positions wait, and cannot wait")
        before = [layer.length for layer in self.cache.layers], dict(self._waiting), self.length
        self._begin_pass(tree, watch, frozenset(checks), carry)
        self._thread = threading.get_ident()
        try:
            self._call(tree)
        except _Enough:
            pass
        except BaseException:  # an interruption too: half a pass must not be taken for one
            self._waiting = before[1]
            del self.ids[before[2] :]
            for layer, length in zip(self.cache.layers, before[0], strict=True):
                layer.set_length(length)
            raise
        finally:
            self._thread = None
        if self._left is not None:
            return PassEnd(*self._left)
        return PassEnd(self._block, self._h[0])

    def _begin_pass(
        self,
        tree: Tree | None,
        watch: StopCheck | None,
        checks: frozenset[int],
        carry: Carry | None,
    ) -> None:
        self._block, self._new = 0, 0 if tree is None else len(tree)
        self._watch, self._checks, self._carry = watch, checks, carry
        self._left: tuple[int, Tensor] | None = None
        self._lay = None if tree is None else self._lay_out(tree)
        self._fits: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.called = []

    def _call(self, tree: Tree | None) -> None:
        begin = self.cache.layers[-1].length
        ids = self.ids[begin:] + ([] if tree is None else list(tree.ids))
        if not ids:
            raise BadSettings("no token to run: none is new, and none waits")
        self.cache.begin = begin
        device = _entry(self.transformer)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids], device=device),
            "past_key_values": self.cache, "use_cache": True,
        }  # fmt: skip
        if self._takes_positions:
            places = [*range(begin, self.length), *([] if tree is None else self._places(tree))]
            inputs["position_ids"] = torch.tensor([places], device=device)
        self.ids += [] if tree is None else tree.ids
        self._queries = len(ids)
        self.transformer.model(**inputs)
        raise ModelRefused(
            f"{self._block} blocks ran in this forward pass; {self.transformer.n_layers} were "
            "wanted"
        )

    def _places(self, tree: Tree) -> list[int]:
        """Where the new tokens stand in their text."""
        return [self.length + depth for depth in tree.depths]

    def _lay_out(self, tree: Tree) -> Placement | None:
        """How the arguments of blocks are laid out for the new tokens; None for a chain."""
        return None if tree.is_chain else along(tree)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a block does instead of running: run on the rows that it lacks, if any."""
        if self._thread != threading.get_ident():  # somebody else's pass
            return original(*args, **kwargs)
        self._block += 1
        block, (place, given) = self._block, _state_of(args, kwargs)
        if block == 1:  # tokens that wait were embedded only so that positions come out right
            wait = given.shape[1] - self._new
            self._h = given[:, wait:] if wait else given
        if self._left is not None:
            return self._pass_by(original, args, kwargs, place, given)
        if (rows := self._waiting.pop(block - 1, None)) is not None:
            self._h = torch.cat([rows, self._h.to(rows.device)], 1)
        if not self._h.shape[1]:
            return self._shapes[block](given)
        plain = self._lay is None and self.axes is not None
        if not (plain and self._h is given and given.shape[1] == self._queries):
            args, kwargs = self._fitted(block, args, kwargs, place, self._h)
        before = self._h[0, -self._new :].clone() if block in self._checks else None
        output = original(*args, **kwargs)  # some blocks add in place, hence the copy
        state = state_given(output)
        if state is None:
            raise ModelRefused("a block gave no state")
        self._shapes.setdefault(block, shape_of(output))
        self._h = state
        if block == self.transformer.n_layers:
            raise _Enough
        if before is not None:
            self._ask(block, before, state)
        return output

    def _ask(self, block: int, before: Tensor, state: Tensor) -> None:
        """Ask whether to stop here, and if so, stop."""
        if self._watch is None or not self._watch(block, before, state[0, -self._new :]):
            return
        if self._carry is None:
            others = self._waiting.get(block, state[:, :0])  # who waits there already
            self._waiting[block] = torch.cat([others, state], 1)
            raise _Enough
        self._left = block, state[0].clone()

    def _pass_by(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: int | str,
        given: Tensor,
    ) -> Any:
        """Above the exit: only keys and values, made from what the state is carried to."""
        assert self._left is not None
        assert self._carry is not None
        layer, h = self._left
        carried = self._carry(h, layer, self._block - 1)[None].to(given.dtype)
        args, kwargs = self._fitted(self._block, args, kwargs, place, carried)
        self.cache.keys_only = True
        try:
            original(*args, **kwargs)
        except KeysStored:
            pass
        finally:
            self.cache.keys_only = False
        if self._block == self.transformer.n_layers:
            raise _Enough
        return self._shapes[self._block](given)

    def _fitted(
        self,
        block: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: int | str,
        h: Tensor,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block with `h` as the state, and all else cut to its rows."""
        named = dict(enumerate(args)) | kwargs
        others = {name: value for name, value in named.items() if name != place}
        if self.axes is None:
            self.called.append(
                BlockArguments(self._queries, self.cache.begin + self._queries, dict(others))
            )
        elif h.shape[1] != self._queries or self._lay is not None:
            others = {
                name: self.axes.fit(block, name, value, h.shape[1], self._lay, self._fits)
                for name, value in others.items()
            }
        others[place] = h
        placed = tuple(others.pop(n) for n in range(len(args)))
        return placed, {str(name): value for name, value in others.items()}

    def take(self, ids: Sequence[int], cache: Cache) -> None:
        """Begin with what somebody else has computed of the text.

        Args:
            ids: the tokens.
            cache: keys and values of all of them, in every layer.
        """
        held = cache.get_seq_length()
        if held != len(ids) or self.length:
            raise BadSettings(f"a cache of {held} positions was handed over for {len(ids)} tokens")
        self.cache.take(cache)
        self.ids = list(ids)

    def cut(self, length: int) -> None:
        """Forget every position from `length` on."""
        if not 0 <= length <= self.length:
            raise BadSettings(f"a text of {self.length} positions cannot be cut to {length}")
        for layer, rows in list(self._waiting.items()):
            left = length - self.cache.layers[layer].length
            if left > 0:
                self._waiting[layer] = rows[:, :left]
            else:
                del self._waiting[layer]
        for kept in self.cache.layers:
            kept.set_length(min(kept.length, length))
        del self.ids[length:]

    def keep(self, nodes: Sequence[int], tree: Tree) -> None:
        """Of the tree that was just entered, keep one path; everything else is forgotten.

        Args:
            nodes: the path from the text so far on; may be empty.
            tree: what was entered.
        """
        start = self.length - len(tree)
        if list(nodes) != list(range(len(nodes))):
            places = torch.tensor(nodes)
            for layer in self.cache.layers:
                layer.gather(start, places.to(layer.device))
            self.ids[start:] = [tree.ids[node] for node in nodes]
        self.cut(start + len(nodes))


def _state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor]:
    place = state_place(args, kwargs)
    if place is None:
        raise ModelRefused("a block was called without a state")
    return place, args[place] if isinstance(place, int) else kwargs[place]


def _entry(transformer: Transformer) -> torch.device:
    device = transformer.model.device
    return torch.device("cpu") if device.type == "meta" else device
