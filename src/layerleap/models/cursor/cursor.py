"""The model run over a cache, each position only as far as needed.

In: a wrapped decoder, and tokens as they come, one after another or as a tree.
Out: states at the layer where a pass ended; keys and values that are right for everything kept.

Positions may wait at a layer. The blocks above run later, in one pass with the positions that
follow. Layers of the cache then differ in length, but a position never waits higher than the one
before it, so the rows that a block has yet to see are always the end of the text.

The model's own forward pass does the work. It is told that the text continues from its shortest
layer, so it makes masks, positions and biases as its family does, and each block gets the rows it
lacks. Which arguments have a row per position is discovered (`axes`).
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.cursor.axes import Arrange, Axes, BlockArguments, branch
from layerleap.models.cursor.cache import KeysStored, RaggedCache
from layerleap.models.cursor.packed import Packed
from layerleap.models.cursor.rowwise import RowByRow
from layerleap.models.cursor.tree import Tree
from layerleap.models.discovery.probe import accepts, entry_device
from layerleap.models.discovery.trace import Shape, required_state, shape_of, state_given
from layerleap.models.hooks.attention import attention_wrapped_by
from layerleap.models.hooks.foreign import foreign_code, in_words
from layerleap.models.hooks.forward import Args, Forward, Kwargs, StopPass, Tap, tapped
from layerleap.models.hooks.rows import Rows
from layerleap.models.transformer import Transformer

# A layer, the new rows of h[layer - 1] and of h[layer]: is that far enough?
StopCheck = Callable[[int, Tensor, Tensor], bool]
Carry = Callable[[Tensor, int, int], Tensor]  # rows of h[src], src, dst: what to use as h[dst]


@dataclass(frozen=True, eq=False)
class PassEnd:
    """Where a pass ended: h[layer] of the last len(h) positions, (row, d_model)."""

    layer: int
    h: Tensor


class Cursor:
    """One text in progress; inside its `with` block it steers the blocks of the model.

    The model is restored on leaving. An error or an interruption undoes the pass that it hits: a
    pass counts as a whole or not at all.
    """

    is_cached = True  # so that edits know

    def __init__(
        self,
        transformer: Transformer,
        axes: Axes | None = None,
        *,
        packed: Packed | None = None,
        rowwise: bool = False,
        text: int = 0,
        prompt: int | None = None,
    ) -> None:
        """Start with an empty text.

        Args:
            transformer: a decoder.
            axes: from `verify.find_axes`; without them nothing can wait or branch.
            packed: weights packed for passes over a few tokens; copies are compared with the
                weights when the first such pass begins, so that a prompt does not wait for it.
            rowwise: each node of a `Tree` gets the bits of a pass of its own, if the model allows
                it (see `verify.keeps_bits`).
            text: which text of a batch this is, for edits that name one.
            prompt: how many tokens its prompt has, for edits of what is generated.
        """
        self.transformer, self.axes = transformer, axes
        self.text, self.prompt = text, prompt
        self._packed, self._rowwise = packed, rowwise
        self._in_use: Packed | None = None
        self.cache = RaggedCache(transformer.n_layers)
        self.ids: list[int] = []  # tokens whose positions were entered
        self.called: list[BlockArguments] = []  # what the blocks of the last pass were called with
        self.attention = RowByRow()  # of the last pass
        self.block = 0  # the block that is running
        self._waiting: dict[int, Tensor] = {}  # by layer: (1, row, d_model)
        self._shapes: dict[int, Shape] = {}
        self._undo = ExitStack()
        self._is_running = False
        self._takes_positions = accepts(transformer.model, "position_ids")

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            tap, model = Tap(around=self._run_block), self.transformer.model
            if code := foreign_code(model):
                raise ModelRefused(
                    f"{self.transformer.identity.name} has {in_words(code)}, which passes over "
                    "some layers or several drafts would leave out; remove it, or make the same "
                    "change with ll.edits"
                )
            undo.enter_context(
                tapped(model, {block: tap for block in self.transformer.block_modules()})
            )
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._in_use = None
        self._undo.close()

    def use(self, packed: Packed | None, *, rowwise: bool) -> None:
        """How to multiply and attend from the next pass on, as for `Cursor` itself."""
        if self._in_use is not None and self._in_use is not packed:
            raise BadSettings("packed weights are in use; they can be taken up, not given up")
        self._packed, self._rowwise = packed, rowwise

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
            new: tokens that follow the text; none to run only what waits.
            watch: asked at the layers `checks` whether to stop there; if so, all rows of the pass
                wait there.
            checks: layers below the last.
            carry: instead of waiting, the new rows leave, and their keys and values in the
                blocks above are computed from the states that this returns.
        """
        tree = new if isinstance(new, Tree) else Tree.chain(new) if new else None
        if tree is not None and not tree.is_chain and (self.waiting or watch):
            raise BadSettings("a tree cannot be entered while positions wait, and cannot wait")
        self._take_packed(is_prompt=not isinstance(new, Tree) and len(new) > 1)
        lengths = [layer.length for layer in self.cache.layers]
        waiting, n_ids = dict(self._waiting), self.length
        self.block, self._n_new = 0, 0 if tree is None else len(tree)
        self._watch, self._checks, self._carry = watch, frozenset(checks), carry
        self._exit: tuple[int, Tensor] | None = None
        self._arrange = None if tree is None else self._arrangement(tree)
        self._fitted: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.called = []
        self._is_running, self.cache.cursor = True, self
        is_rowwise = self._rowwise and isinstance(new, Tree) and len(new) > 1
        self.attention = RowByRow()
        try:
            with attention_wrapped_by(self.attention) if is_rowwise else nullcontext():
                self._call_model(tree)
        except StopPass:
            pass
        except BaseException:  # an interruption too: half a pass must not count as one
            self._waiting = waiting
            del self.ids[n_ids:]
            for layer, length in zip(self.cache.layers, lengths, strict=True):
                layer.set_length(length)
            raise
        finally:
            self._is_running, self.cache.cursor = False, None
        if self._exit is not None:
            return PassEnd(*self._exit)
        return PassEnd(self.block, self._h[0])

    def _take_packed(self, *, is_prompt: bool) -> None:
        if self._packed is None:
            return
        if self._in_use is None and not is_prompt:
            self._undo.enter_context(self._packed.in_use(self.transformer.model))
            self._in_use = self._packed
        self._packed.is_paused = is_prompt  # a prompt is computed as `generate` computes it
        self._packed.keeps_bits = self._rowwise

    def rows(self, n: int) -> Rows:
        """The n rows that the running block is given, for edits."""
        positions = torch.tensor(self._positions[-n:])
        prompts = None if self.prompt is None else torch.full((n,), self.prompt)
        return Rows(torch.full((n,), self.text), positions, prompts)

    def _call_model(self, tree: Tree | None) -> None:
        begin = self.cache.layers[-1].length
        ids = self.ids[begin:] + ([] if tree is None else list(tree.ids))
        if not ids:
            raise BadSettings("no token to run: none is new, and none waits")
        self.cache.begin = begin
        device = entry_device(self.transformer.model)
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([ids], device=device),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        new = [] if tree is None else self._tree_positions(tree)
        self._positions = [*range(begin, self.length), *new]
        if self._takes_positions:
            inputs["position_ids"] = torch.tensor([self._positions], device=device)
        self.ids += [] if tree is None else tree.ids
        self._n_queries = len(ids)
        self.transformer.model(**inputs)
        raise ModelRefused(
            f"{self.block} blocks ran in this forward pass; expected {self.transformer.n_layers}"
        )

    def _tree_positions(self, tree: Tree) -> list[int]:
        """The positions of the new tokens in their text."""
        return [self.length + depth for depth in tree.depths]

    def _arrangement(self, tree: Tree) -> Arrange | None:
        """How the arguments of blocks are arranged for the new tokens; None for a chain."""
        return None if tree.is_chain else partial(branch, tree)

    def _run_block(self, original: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a block on the rows that it lacks, if any."""
        if not self._is_running:  # a pass that is not ours
            return original(*args, **kwargs)
        self.block += 1
        block, (_, given) = self.block, required_state(args, kwargs)
        if block == 1:  # tokens that wait were embedded only to get positions right
            n_waiting = given.shape[1] - self._n_new
            self._h = given[:, n_waiting:] if n_waiting else given
        if self._exit is not None:
            return self._store_keys(original, args, kwargs)
        if (rows := self._waiting.pop(block - 1, None)) is not None:
            self._h = torch.cat([rows, self._h.to(rows.device)], 1)
        if not self._h.shape[1]:
            return self._shapes[block](given)
        is_plain = self._arrange is None and self.axes is not None
        if not (is_plain and self._h is given and given.shape[1] == self._n_queries):
            args, kwargs = self._fit(args, kwargs, self._h)
        # A copy, because some blocks add in place.
        before = self._h[0, -self._n_new :].clone() if block in self._checks else None
        output = original(*args, **kwargs)
        state = state_given(output)
        if state is None:
            raise ModelRefused("a block returned no state")
        self._shapes.setdefault(block, shape_of(output))
        self._h = state
        if block == self.transformer.n_layers:
            raise StopPass
        if before is not None:
            self._check_stop(block, before, state)
        return output

    def _check_stop(self, block: int, before: Tensor, state: Tensor) -> None:
        """Ask whether to stop here, and if so, stop."""
        if self._watch is None or not self._watch(block, before, state[0, -self._n_new :]):
            return
        if self._carry is None:
            others = self._waiting.get(block, state[:, :0])  # rows that wait there already
            self._waiting[block] = torch.cat([others, state], 1)
            raise StopPass
        self._exit = block, state[0].clone()

    def _store_keys(self, original: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Above the exit: compute only keys and values, from the states that `carry` returns."""
        assert self._exit is not None
        assert self._carry is not None
        (layer, h), (_, given) = self._exit, required_state(args, kwargs)
        carried = self._carry(h, layer, self.block - 1)[None].to(given.dtype)
        args, kwargs = self._fit(args, kwargs, carried)
        self.cache.keys_only = True
        try:
            with suppress(KeysStored):
                original(*args, **kwargs)
        finally:
            self.cache.keys_only = False
        if self.block == self.transformer.n_layers:
            raise StopPass
        return self._shapes[self.block](given)

    def _fit(self, args: Args, kwargs: Kwargs, h: Tensor) -> tuple[Args, Kwargs]:
        """The arguments of a block with `h` as the state, and everything else cut to its rows."""
        named, (place, _) = dict(enumerate(args)) | kwargs, required_state(args, kwargs)
        others = {name: value for name, value in named.items() if name != place}
        if self.axes is None:
            self.called.append(
                BlockArguments(self._n_queries, self.cache.begin + self._n_queries, dict(others))
            )
        elif h.shape[1] != self._n_queries or self._arrange is not None:
            others = {
                name: self.axes.fit(
                    self.block, name, value, h.shape[1], self._arrange, self._fitted
                )
                for name, value in others.items()
            }
        others[place] = h
        positional = tuple(others.pop(n) for n in range(len(args)))
        return positional, {str(name): value for name, value in others.items()}

    def take(self, ids: Sequence[int], cache: Cache) -> None:
        """Begin with tokens whose keys and values were computed elsewhere."""
        n_cached = cache.get_seq_length()
        if n_cached != len(ids) or self.length:
            raise BadSettings(
                f"got a cache of {n_cached} positions for {len(ids)} tokens, with {self.length} "
                "entered before; expected as many positions as tokens, and none entered"
            )
        self.cache.take(cache)
        self.ids = list(ids)

    def cut(self, length: int) -> None:
        """Forget every position from `length` on."""
        if not 0 <= length <= self.length:
            raise BadSettings(f"a text of {self.length} positions cannot be cut to {length}")
        for layer, rows in list(self._waiting.items()):
            n_left = length - self.cache.layers[layer].length
            if n_left > 0:
                self._waiting[layer] = rows[:, :n_left]
            else:
                del self._waiting[layer]
        for cached in self.cache.layers:
            cached.set_length(min(cached.length, length))
        del self.ids[length:]

    def keep(self, nodes: Sequence[int], tree: Tree) -> None:
        """Keep one path (perhaps empty) of the tree that was just entered; forget the rest."""
        start = self.length - len(tree)
        if list(nodes) != list(range(len(nodes))):
            offsets = torch.tensor(nodes)
            for layer in self.cache.layers:
                layer.gather(start, offsets.to(layer.device))
            self.ids[start:] = [tree.ids[node] for node in nodes]
        self.cut(start + len(nodes))
