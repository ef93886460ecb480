"""Reading the residual stream while the model runs.

In: a wrapped model, its inputs, and which layers, sites, heads and positions to read.
Out: those states and nothing else. Rows are gathered during the pass, so that reading one position
does not keep the activations of a whole batch. Or, with a metric, its gradients by all of these.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.probe import prepare
from layerleap.models.discovery.sites import Site
from layerleap.models.discovery.trace import (
    required_state,
    state_given,
    state_taken,
    with_output,
    with_state,
)
from layerleap.models.facts import check_number
from layerleap.models.hooks.attention_weights import AttentionWeights
from layerleap.models.hooks.forward import Args, Kwargs, StopPass, Tap, tapped
from layerleap.models.inputs import Order, as_inputs, laid_out, run
from layerleap.models.metric import Bound
from layerleap.short_repr import ShortRepr

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer


@dataclass(repr=False)
class Capture(ShortRepr):
    """The values read in one forward pass.

    `states[layer]` is h[layer]; `sites[block, name]` is the value at a site of the block that
    makes h[block]. With `keep`, both are (row, d_model); without, (batch, pos, d_model).
    `heads[block]` is what the heads give before the output matrix, and has the axes (head, width of
    a head) last. `attention[block]` are the weights of its keys, (batch, head, query, key), or with
    `keep`, (row, head, key). `gradients` are those of the metric, as a capture of its own.
    """

    states: dict[int, Tensor] = field(default_factory=dict)
    sites: dict[tuple[int, str | Site], Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    heads: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    gradients: "Capture | None" = None


@torch.no_grad()  # not inference mode: a probe may be trained on the captured states
def capture(
    transformer: "Transformer",
    inputs: Any,
    *,
    layers: Collection[int] | None = None,
    sites: Collection[tuple[int, str | Site]] = (),
    keep: Tensor | None = None,
    logits: bool = False,
    heads: bool | Collection[int] = False,
    attention: bool | Collection[int] = False,
    gradients: Any = None,
) -> Capture:
    """Run the model once and return the states, sites and logits that were asked for.

    Args:
        transformer: the wrapped model.
        inputs: a text, texts, token ids, a tensor, or keyword arguments of the forward pass (see
            `models.inputs`); on any device, padded on either side.
        layers: which h[layer] to keep; all when None.
        sites: pairs (block, site), blocks counted from 1: block b makes h[b]. A site is a name, or
            a `Site` for any module of the block.
        keep: boolean (batch, pos): the positions to gather, in row-major order; where the head
            pools positions, those that it pools, which make one row per text (attention weights
            have one row per position all the same).
        logits: also run the tail. Without it the pass ends after the last block needed.
        heads: the blocks whose heads to read; all when True.
        attention: the blocks whose attention weights to read; all when True.
        gradients: a metric such as `ll.metrics.logit_difference(" John", " Mary")`, or a function
            from logits (text, d_vocab) to a number per text. The gradients of its sum over the
            texts by all states, sites and heads that are read; edits in force take part.
    """
    chosen = set(range(transformer.n_layers + 1)) if layers is None else _numbers(layers)
    for layer in chosen:
        check_layer(transformer, layer)
    for block, name in sites:
        check_block(transformer, block)
        if isinstance(name, str) and name not in transformer.sites(block):
            known = ", ".join(transformer.sites(block)) or "none"
            raise BadSettings(f"no site {name!r} in block {block}; expected one of: {known}")
    head_sites = _head_sites(transformer, heads)
    patterns = AttentionWeights(transformer, _blocks(transformer, attention))
    arguments = prepare(transformer.model, as_inputs(transformer, inputs))
    arguments, order = laid_out(transformer.model, arguments)
    is_inference = torch.is_inference_mode_enabled() and gradients is None
    arguments = arguments if gradients is None else _made_outside_inference_mode(arguments)
    every = {*sites, *head_sites}
    stop = None if logits or gradients is not None else max(patterns.blocks, default=0)
    reader = _Reader(transformer, chosen, every, keep, order, stop, gradients is not None)
    bound = None if gradients is None else Bound.of(transformer, gradients)
    with (
        torch.inference_mode(is_inference),
        patterns.recorded(),
        tapped(transformer.model, reader.taps()),
        torch.set_grad_enabled(bound is not None),
        suppress(StopPass),
    ):
        output = run(transformer, arguments)
        if bound is not None:
            reader.differentiate(bound.of_pass(arguments, output.logits).sum())
        if logits:
            own = output.logits.detach()
            reader.captured.logits = own if order is None or own.dim() == 2 else order.restore(own)
    captured = reader.captured
    if missing := chosen - captured.states.keys():
        raise ModelRefused(f"layers {sorted(missing)} were never reached in this forward pass")
    captured.attention = patterns.rows(order, keep)
    for one in filter(None, (captured, captured.gradients)):
        for place, shape in head_sites.items():
            one.heads[place[0]] = one.sites[place].unflatten(-1, shape)
            if place not in sites:
                del one.sites[place]
    return captured


def _made_outside_inference_mode(arguments: dict[str, Any]) -> dict[str, Any]:
    """Copies of the tensors; those made in that mode cannot take part in gradients."""
    with torch.inference_mode(False):
        return {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }


def _blocks(transformer: "Transformer", chosen: bool | Collection[int]) -> list[int]:
    blocks = range(1, transformer.n_layers + 1) if chosen is True else chosen or ()
    for block in blocks:
        check_block(transformer, block)
    return list(blocks)


def _head_sites(
    transformer: "Transformer", chosen: bool | Collection[int]
) -> dict[tuple[int, Site], tuple[int, int]]:
    """Where the heads of blocks enter the output matrix; how many there are, and their width."""
    blocks = _blocks(transformer, chosen)
    if not blocks:
        return {}
    from layerleap.models.weights.heads import heads  # it is found by passes that capture

    found = [(block, heads(transformer, block)) for block in blocks]
    return {
        (block, Site(own.outputs.path.removeprefix(f"{transformer.blocks[block - 1]}."), "in")): (
            own.n_heads,
            own.d_value,
        )
        for block, own in found
    }


class _Reader:
    """The taps of one forward pass, and what they read."""

    def __init__(
        self,
        transformer: "Transformer",
        layers: set[int],
        sites: set[tuple[int, str | Site]],
        keep: Tensor | None,
        order: Order | None,
        stop: int | None,
        with_gradients: bool,
    ) -> None:
        self.transformer, self.layers, self.sites = transformer, layers, sites
        self.keep, self.order = keep, order
        # The layer after which the pass can stop; None if the tail has to run as well.
        last = max([*layers, *(block for block, _ in sites)], default=0)
        self.stop_layer = None if stop is None else max(last, stop)
        self.with_gradients = with_gradients
        self.tracked: dict[Any, Tensor] = {}  # by layer, or by block and site, with their history
        self.layer = 0  # blocks applied so far; a shared block (ALBERT) runs once per layer
        self.shape: torch.Size | None = None
        self.captured = Capture()

    def taps(self) -> list[tuple[nn.Module, Tap]]:
        transformer, blocks = self.transformer, self.transformer.block_modules()
        taps = [(blocks[0], self._tap("in", self.before_first_block))]
        taps += [(block, self._tap("out", self.after_block)) for block in blocks]
        sites = {  # a shared block (ALBERT) has the same module in many layers
            (name, transformer.site_module(block, site)): site.side
            for block, name in self.sites
            for site in [transformer.sites(block)[name] if isinstance(name, str) else name]
        }
        return taps + [
            (module, self._tap(side, partial(self.at_site, name)))
            for (name, module), side in sites.items()
        ]

    def _tap(self, side: str, see: Callable[[Tensor | None], Tensor | None]) -> Tap:
        """Look at a value; for gradients, let the model go on with a copy of it.

        A block may add in place to what it is given, which would change what was looked at.
        """

        def change_input(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
            value = see(state_taken(args, kwargs))
            if value is None:
                return args, kwargs
            place, _ = required_state(args, kwargs)
            return with_state(args, kwargs, place, value)

        def change_output(output: Any) -> Any:
            state = state_given(output)
            value = see(state)
            return output if value is None or state is None else with_output(output, state, value)

        if self.with_gradients:
            is_input = side == "in"
            return Tap(change_input=change_input) if is_input else Tap(change_last=change_output)
        if side == "in":
            return Tap(see_input=lambda args, kwargs: _ignored(see(state_taken(args, kwargs))))
        return Tap(see_output=lambda output: _ignored(see(state_given(output))))

    def before_first_block(self, state: Tensor | None) -> Tensor | None:
        if self.layer or state is None:
            return None
        self.shape = state.shape[:2]
        # Whatever the parameters ask for, gradients are followed from here on.
        return self._reached(state.detach().requires_grad_() if self.with_gradients else state)

    def after_block(self, state: Tensor | None) -> Tensor | None:
        self.layer += 1
        return None if state is None else self._reached(state)

    def _reached(self, state: Tensor) -> Tensor:
        if self.layer in self.layers:
            self.captured.states[self.layer] = self._rows(state)
        if self.layer == self.stop_layer:
            raise StopPass
        return self._tracked(self.layer, state) if self.layer in self.layers else state

    def at_site(self, name: str | Site, value: Tensor | None) -> Tensor | None:
        """A value inside the block that makes h[layer + 1]."""
        if (self.layer + 1, name) not in self.sites or value is None:
            return None
        self.captured.sites[self.layer + 1, name] = self._rows(value)
        return self._tracked((self.layer + 1, name), value)

    def _tracked(self, place: Any, value: Tensor) -> Tensor:
        """What the model goes on with: a copy, if gradients by the value are wanted."""
        if not self.with_gradients:
            return value
        self.tracked[place] = value
        return value.clone()

    def differentiate(self, value: Tensor) -> None:
        """The gradients of a number by everything that was read."""
        if not value.requires_grad:
            raise BadSettings("this metric has no gradient by the logits of a single run")
        places, values = list(self.tracked), list(self.tracked.values())
        grads = torch.autograd.grad(value, values, allow_unused=True) if values else ()
        found = self.captured.gradients = Capture()
        for place, own, grad in zip(places, values, grads, strict=True):
            rows = self._rows(torch.zeros_like(own) if grad is None else grad)
            if self.keep is not None and self.transformer.row_kind == "mean":
                n = self.keep.sum(1)  # moving the mean state moves each of the n that are pooled
                rows = rows * n[n > 0].to(rows.device)[:, None]
            if isinstance(place, tuple):
                found.sites[place] = rows
            else:
                found.states[place] = rows

    def _rows(self, value: Tensor) -> Tensor:
        """The kept positions; a copy, because a view would hold the whole activation."""
        value = value.detach()
        if self.shape is not None and value.shape[:2] != self.shape:
            value = value.reshape(*self.shape, -1)  # experts get rows without the batch axis
        if self.order is not None:
            value = self.order.restore(value)
        return value.clone() if self.keep is None else self.transformer.rows(value, self.keep)


def _ignored(value: Tensor | None) -> None:
    """Observers return nothing."""


def _numbers(layers: Any) -> set[int]:
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise BadSettings(f"layers {layers!r}; expected several, as in layers=[0, 3]")
    return set(layers)


def check_layer(transformer: "Transformer", layer: int) -> None:
    """Refuse a layer that the model does not have."""
    check_number("layer", layer, 0, transformer.n_layers)


def check_block(transformer: "Transformer", block: int) -> None:
    """Refuse a block that the model does not have; block b makes h[b]."""
    check_number("block", block, 1, transformer.n_layers)
