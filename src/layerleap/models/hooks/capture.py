"""Reading the residual stream while the model runs.

In: a wrapped model, its inputs, and which layers, sites and positions to read.
Out: those states and nothing else. Rows are gathered during the pass, so that reading one position
does not keep the activations of a whole batch.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.probe import prepare
from layerleap.models.discovery.sites import Site
from layerleap.models.discovery.trace import state_given, state_taken
from layerleap.models.facts import check_number
from layerleap.models.hooks.forward import StopPass, Tap, tapped
from layerleap.models.inputs import Order, as_inputs, laid_out, run
from layerleap.short_repr import ShortRepr

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer


@dataclass(repr=False)
class Capture(ShortRepr):
    """The values read in one forward pass.

    `states[layer]` is h[layer]; `sites[block, name]` is the value at a site of the block that
    makes h[block]. With `keep`, both are (row, d_model); without, (batch, pos, d_model).
    """

    states: dict[int, Tensor] = field(default_factory=dict)
    sites: dict[tuple[int, str | Site], Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


@torch.no_grad()  # not inference mode: a probe may be trained on the captured states
def capture(
    transformer: "Transformer",
    inputs: Any,
    *,
    layers: Collection[int] | None = None,
    sites: Collection[tuple[int, str | Site]] = (),
    keep: Tensor | None = None,
    logits: bool = False,
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
            pools positions, those that it pools, which make one row per text.
        logits: also run the tail. Without it the pass ends after the last block needed.
    """
    chosen = set(range(transformer.n_layers + 1)) if layers is None else _numbers(layers)
    for layer in chosen:
        check_layer(transformer, layer)
    for block, name in sites:
        check_block(transformer, block)
        if isinstance(name, str) and name not in transformer.sites(block):
            known = ", ".join(transformer.sites(block)) or "none"
            raise BadSettings(f"no site {name!r} in block {block}; expected one of: {known}")
    arguments = prepare(transformer.model, as_inputs(transformer, inputs))
    arguments, order = laid_out(transformer.model, arguments)
    reader = _Reader(transformer, chosen, set(sites), keep, order, stop=not logits)
    with tapped(transformer.model, reader.taps()), suppress(StopPass):
        output = run(transformer, arguments)
        if logits:
            own = output.logits
            reader.captured.logits = own if order is None or own.dim() == 2 else order.restore(own)
    if missing := chosen - reader.captured.states.keys():
        raise ModelRefused(f"layers {sorted(missing)} were never reached in this forward pass")
    return reader.captured


class _Reader:
    """The taps of one forward pass, and what they read."""

    def __init__(
        self,
        transformer: "Transformer",
        layers: set[int],
        sites: set[tuple[int, str | Site]],
        keep: Tensor | None,
        order: Order | None,
        stop: bool,
    ) -> None:
        self.transformer, self.layers, self.sites = transformer, layers, sites
        self.keep, self.order = keep, order
        # The layer after which the pass can stop; None if the tail has to run as well.
        last = max([*layers, *(block for block, _ in sites)], default=0)
        self.stop_layer = last if stop else None
        self.layer = 0  # blocks applied so far; a shared block (ALBERT) runs once per layer
        self.shape: torch.Size | None = None
        self.captured = Capture()

    def taps(self) -> list[tuple[nn.Module, Tap]]:
        transformer, blocks = self.transformer, self.transformer.block_modules()
        taps = [(blocks[0], Tap(see_input=self.before_first_block))]
        taps += [(block, Tap(see_output=self.after_block)) for block in blocks]
        sites = {  # a shared block (ALBERT) has the same module in many layers
            (name, transformer.site_module(block, site)): site.side
            for block, name in self.sites
            for site in [transformer.sites(block)[name] if isinstance(name, str) else name]
        }
        return taps + [
            (module, self._site_tap(name, side)) for (name, module), side in sites.items()
        ]

    def _site_tap(self, name: str | Site, side: str) -> Tap:
        if side == "in":
            return Tap(see_input=lambda args, kwargs: self.at_site(name, state_taken(args, kwargs)))
        return Tap(see_output=lambda output: self.at_site(name, state_given(output)))

    def before_first_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.layer == 0 and (state := state_taken(args, kwargs)) is not None:
            self.shape = state.shape[:2]
            self._reached(state)

    def after_block(self, output: Any) -> None:
        self.layer += 1
        if (state := state_given(output)) is not None:
            self._reached(state)

    def _reached(self, state: Tensor) -> None:
        if self.layer in self.layers:
            self.captured.states[self.layer] = self._rows(state)
        if self.layer == self.stop_layer:
            raise StopPass

    def at_site(self, name: str | Site, value: Tensor | None) -> None:
        """A value inside the block that makes h[layer + 1]."""
        if (self.layer + 1, name) in self.sites and value is not None:
            self.captured.sites[self.layer + 1, name] = self._rows(value)

    def _rows(self, value: Tensor) -> Tensor:
        """The kept positions; a copy, because a view would hold the whole activation."""
        if self.shape is not None and value.shape[:2] != self.shape:
            value = value.reshape(*self.shape, -1)  # experts get rows without the batch axis
        if self.order is not None:
            value = self.order.restore(value)
        return value.clone() if self.keep is None else self.transformer.rows(value, self.keep)


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
