"""Reading the residual stream while the model runs.

In: a wrapped model, its inputs, and which layers, sites and positions are wanted.
Out: those states and nothing else; rows are gathered inside the hook, so a whole batch of
activations is never kept for the sake of one position.

Hooks are set on entering and removed on leaving, whatever happens in between.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.probe import prepare
from layerleap.models.discovery.trace import state_given, state_taken

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer


@dataclass
class Capture:
    """What one forward pass showed.

    `states[layer]` is h[layer]; `sites[block, name]` is the value at a site of the block that
    makes h[block]. With `keep`, both are (row, d_model); without, (batch, pos, d_model).
    """

    states: dict[int, Tensor] = field(default_factory=dict)
    sites: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


class _Enough(Exception):
    """Raised inside the forward pass once everything wanted has been seen."""


@torch.no_grad()  # not inference mode: a probe may be trained on what is seen
def capture(
    transformer: "Transformer",
    inputs: Mapping[str, Any],
    *,
    layers: Collection[int] | None = None,
    sites: Collection[tuple[int, str]] = (),
    keep: Tensor | None = None,
    logits: bool = False,
) -> Capture:
    """Run the model once and return what was asked for.

    Args:
        transformer: the wrapped model.
        inputs: keyword arguments of its forward pass, on any device; no padding on the left.
        layers: which h[layer] to keep; all when None.
        sites: pairs (block, site name), blocks counted from 1: block b makes h[b].
        keep: boolean (batch, pos): the positions to gather, in row-major order.
        logits: also run the tail. Without it the pass ends after the last block needed.
    """
    wanted = set(range(transformer.n_layers + 1)) if layers is None else set(layers)
    _check_wanted(transformer, wanted, sites)
    watch = _Watch(wanted, frozenset(sites), keep, stop=not logits)
    with ExitStack() as hooks:
        for path in dict.fromkeys(transformer.blocks):
            block = transformer.model.get_submodule(path)
            before = block.register_forward_pre_hook(watch.before_block, with_kwargs=True)
            hooks.callback(before.remove)
            hooks.callback(block.register_forward_hook(watch.after_block).remove)
        for name, side, module in transformer.site_modules(sites):
            hooks.callback(_site_hook(module, name, side, watch).remove)
        with suppress(_Enough):
            output = transformer.model(**prepare(transformer.model, inputs))
            watch.seen.logits = output.logits if logits else None
    if missing := wanted - watch.seen.states.keys():
        raise ModelRefused(f"layers {sorted(missing)} were never reached in this forward pass")
    return watch.seen


class _Watch:
    """What the hooks of one forward pass share."""

    def __init__(
        self,
        layers: set[int],
        sites: frozenset[tuple[int, str]],
        keep: Tensor | None,
        stop: bool,
    ) -> None:
        self.layers, self.sites, self.keep = layers, sites, keep
        # The layer after which nothing more is wanted; never, if the tail is to run as well.
        last = max([*layers, *(block for block, _ in sites)], default=0)
        self.enough = last if stop else None
        self.done = 0  # blocks applied so far; a shared block (ALBERT) runs once per layer
        self.shape: torch.Size | None = None
        self.seen = Capture()

    def before_block(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """h[0] is what the first block takes."""
        state = state_taken(args, kwargs)
        if self.done == 0 and state is not None:
            self.shape = state.shape[:2]
            self._reached(state)

    def after_block(self, module: nn.Module, args: Any, output: Any) -> None:
        """h[l] is what block l gives."""
        self.done += 1
        state = state_given(output)
        if state is not None:
            self._reached(state)

    def _reached(self, state: Tensor) -> None:
        if self.done in self.layers:
            self.seen.states[self.done] = self._rows(state)
        if self.done == self.enough:
            raise _Enough

    def at_site(self, name: str, value: Tensor | None) -> None:
        """A value inside the block that makes h[done + 1]."""
        if (self.done + 1, name) in self.sites and value is not None:
            self.seen.sites[self.done + 1, name] = self._rows(value)

    def _rows(self, value: Tensor) -> Tensor:
        """The kept positions; a copy, because a view would hold the whole activation."""
        if self.shape is not None and value.shape[:2] != self.shape:
            value = value.reshape(*self.shape, -1)  # experts see rows without the batch axis
        return value.clone() if self.keep is None else value[self.keep.to(value.device)]


def _site_hook(module: nn.Module, name: str, side: str, watch: _Watch) -> RemovableHandle:
    if side == "in":
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: watch.at_site(name, state_taken(args, kwargs)),
            with_kwargs=True,
        )
    return module.register_forward_hook(
        lambda _, __, output: watch.at_site(name, state_given(output))
    )


def _check_wanted(
    transformer: "Transformer", layers: set[int], sites: Collection[tuple[int, str]]
) -> None:
    top = transformer.n_layers
    for layer in layers:
        if not 0 <= layer <= top:
            raise BadSettings(f"layer {layer} does not exist: this model has layers 0 to {top}")
    for block, name in sites:
        if not 1 <= block <= top:
            raise BadSettings(f"block {block} does not exist: this model has blocks 1 to {top}")
        if name not in transformer.sites(block):
            known = ", ".join(transformer.sites(block)) or "none"
            raise BadSettings(f"no site {name!r} in block {block}; there are: {known}")
