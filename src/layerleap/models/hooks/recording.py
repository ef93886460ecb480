"""One forward pass kept whole, so that any of its blocks can run again from any state.

In: a wrapped model and its inputs.
Out: `Recording`: h[0] .. h[n_layers] at all positions, and the other arguments of each block
(masks, position embeddings); the model's own blocks then run on other states as they ran on these.
"""

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.probe import prepare
from layerleap.models.discovery.sites import Site
from layerleap.models.discovery.trace import required_state, state_given, state_taken, with_state
from layerleap.models.hooks.capture import Capture, capture
from layerleap.models.hooks.edit import edits_in_force
from layerleap.models.hooks.foreign import PRE_HOOK, foreign_code, in_words
from layerleap.models.hooks.forward import Args, Kwargs, Tap, tapped
from layerleap.models.hooks.rows import ModelPass
from layerleap.models.inputs import Order, as_inputs, laid_out
from layerleap.models.transformer import Transformer
from layerleap.short_repr import ShortRepr


@dataclass(frozen=True, eq=False)
class _Call:
    """How one block was called, without the state."""

    module: nn.Module
    args: tuple[Any, ...]  # None in place of the state
    kwargs: dict[str, Any]
    place: int | str  # of the state

    def __call__(self, h: Tensor) -> Tensor:
        args, kwargs = with_state(self.args, self.kwargs, self.place, h)
        state = state_given(self.module(*args, **kwargs))
        if state is None:
            raise ModelRefused(
                "a block returned no state when it was run again; load the model again"
            )
        return state


@dataclass(frozen=True, eq=False, repr=False)
class Recording(ShortRepr):
    """One forward pass of one batch.

    states[l]  h[l] at all positions: (batch, pos, d_model)
    logits     the model's own, if they were asked for
    """

    transformer: Transformer
    states: tuple[Tensor, ...]
    calls: tuple[_Call, ...]
    origin: ModelPass  # which positions there are
    logits: Tensor | None = None
    order: Order | None = None  # in which the blocks ran, if padding was on the left

    @torch.no_grad()  # not inference mode: the result may be trained on
    def run(self, h: Tensor, start: int, stop: int | None = None) -> Tensor:
        """h[stop] if h[start] is `h`: blocks start + 1 .. stop run on it, up to the last when None.

        The blocks get the masks and positions that were recorded, so `h` is usually of the same
        (batch, pos); with h = states[start] the result is states[stop], bit-identical. Edits in
        force apply, but those of h[0] only if they came after the recording: states[0] has the
        others in it.
        """
        last = len(self.calls)
        stop = last if stop is None else stop
        if not 0 <= start <= stop <= last:
            raise BadSettings(
                f"blocks {start + 1} to {stop} cannot be run: this model has layers 0 to {last}"
            )
        # A copy: some blocks add in place, and the state belongs to the caller.
        h = h.clone() if self.order is None else self.order.arrange(h)
        edited = edits_in_force(self.transformer.model)
        running = (
            nullcontext() if edited is None else edited.running(replace(self.origin, block=start))
        )
        with running:
            for call in self.calls[start:stop]:
                h = call(h)
        return h if self.order is None else self.order.restore(h)

    def inside(
        self, block: int, sites: Collection[str | Site], keep: Tensor, h: Tensor | None = None
    ) -> Capture:
        """One block run again, on `h` or on its recorded input: its states and sites.

        Rows are those of the kept positions, (batch, pos), as `capture` gives them. Edits apply.
        """
        transformer, before = self.transformer, self.states[block - 1] if h is None else h
        values: dict[str | Site, Tensor] = {}

        def tap(name: str | Site) -> tuple[nn.Module, Tap]:
            site = transformer.sites(block)[name] if isinstance(name, str) else name
            module = transformer.site_module(block, site)
            if site.side == "in":
                return module, Tap(see_input=lambda *call: note(name, state_taken(*call)))
            return module, Tap(see_output=lambda output: note(name, state_given(output)))

        def note(name: str | Site, value: Tensor | None) -> None:
            if value is not None:
                values[name] = value.detach().reshape(*before.shape[:2], -1)

        with tapped(transformer.model, [tap(name) for name in sites]):
            after = self.run(before, block - 1, block)
        if self.order is not None:
            values = {name: self.order.restore(value) for name, value in values.items()}
        return Capture(
            {block - 1: transformer.rows(before, keep), block: transformer.rows(after, keep)},
            {(block, name): transformer.rows(value, keep) for name, value in values.items()},
        )

    def rows(self, keep: Tensor) -> dict[int, Tensor]:
        """h[layer] at the kept positions, as `capture` gives them: (row, d_model) by layer."""
        return {layer: self.transformer.rows(h, keep) for layer, h in enumerate(self.states)}


@torch.no_grad()
def record(transformer: Transformer, inputs: Any, *, logits: bool = False) -> Recording:
    """Run the model once, without a cache, and keep what is needed to run its blocks again.

    Hooks of others on the blocks run again too; a pre-hook would then change a state twice, so a
    model with one is refused.
    """
    blocks = {path: transformer.model.get_submodule(path) for path in transformer.blocks}
    code = foreign_code(transformer.model, blocks.items())
    if before_block := [one for one in code if one.kind == PRE_HOOK]:
        raise ModelRefused(
            f"{transformer.identity.name} has {in_words(before_block)}, so the block cannot be run "
            "again on its own; remove it, or change the output of the block before, with a forward "
            "hook or with ll.edits"
        )
    calls: list[_Call] = []

    def before(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        place, _ = required_state(args, kwargs)
        # Without the state itself, which would be held twice.
        calls.append(_Call(module, *with_state(args, kwargs, place, None), place))

    model = transformer.model
    arguments, order = laid_out(model, prepare(model, as_inputs(transformer, inputs)))
    taps = {block: Tap(see_input=partial(before, block)) for block in blocks.values()}
    with tapped(model, taps):
        captured = capture(transformer, inputs, logits=logits)
    states = tuple(captured.states[layer] for layer in range(transformer.n_layers + 1))
    edited = edits_in_force(model)
    origin = replace(
        ModelPass.of(model, arguments, None),
        shape=tuple(states[0].shape[:2]),
        in_force=() if edited is None else edited.in_force,
    )
    return Recording(transformer, states, tuple(calls), origin, captured.logits, order)
