"""One forward pass kept whole, so that any stretch of blocks can be run again from any state.

In: a wrapped model and its inputs.
Out: `Recording`: h[0] .. h[n_layers] at all positions, and what else each block was called with
(masks, position embeddings); the model's own blocks then run on other states as they ran on these.
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.probe import prepare
from layerleap.models.discovery.trace import state_given, state_place, state_taken
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class _Call:
    """How one block was called, but for the state."""

    module: nn.Module
    args: tuple[Any, ...]  # None stands where the state was
    kwargs: dict[str, Any]
    place: int | str  # of the state

    def __call__(self, h: Tensor) -> Tensor:
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.place, int):
            args[self.place] = h
        else:
            kwargs[self.place] = h
        given = state_given(self.module(*args, **kwargs))
        if given is None:
            raise ModelRefused("a block gave no state when it was run again; wrap the model anew")
        return given


@dataclass(frozen=True, eq=False)
class Recording:
    """One forward pass of one batch.

    states[l]  h[l] at all positions: (batch, pos, d_model)
    logits     the model's own, if they were asked for
    """

    transformer: Transformer
    states: tuple[Tensor, ...]
    calls: tuple[_Call, ...]
    logits: Tensor | None = None

    @torch.no_grad()  # not inference mode: what comes out may be trained on
    def run(self, h: Tensor, start: int, stop: int | None = None) -> Tensor:
        """Take `h` as h[start] and run blocks start + 1 .. stop on it; to the last when None.

        The blocks get the masks and positions that were recorded, so `h` is usually of the same
        (batch, pos); with h = states[start] the answer is states[stop] to the bit.
        """
        last = len(self.calls)
        stop = last if stop is None else stop
        if not 0 <= start <= stop <= last:
            raise BadSettings(
                f"blocks {start + 1} to {stop} cannot be run: this model has layers 0 to {last}"
            )
        h = h.clone()  # some blocks add in place, and the state is the caller's
        for call in self.calls[start:stop]:
            h = call(h)
        return h

    def rows(self, keep: Tensor) -> dict[int, Tensor]:
        """h[layer] at the kept positions, as `see` gives them: (row, d_model) by layer."""
        return {layer: h[keep.to(h.device)] for layer, h in enumerate(self.states)}


class _Enough(Exception):
    """Raised after the last block, when nobody wants the logits."""


@torch.no_grad()
def record(
    transformer: Transformer, inputs: Mapping[str, Any], *, logits: bool = False
) -> Recording:
    """Run the model once, without a cache, and keep what is needed to run its blocks again.

    Args:
        transformer: the wrapped model.
        inputs: keyword arguments of its forward pass, on any device; no padding on the left.
        logits: also run the tail and keep the model's own logits.
    """
    states: list[Tensor] = []
    calls: list[_Call] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place, state = state_place(args, kwargs), state_taken(args, kwargs)
        if place is None or state is None:
            raise ModelRefused("a block was called without a state, so it cannot be run again")
        states.append(state.clone())
        # Without the state itself, which would be held twice.
        kept = tuple(None if at == place else value for at, value in enumerate(args))
        others = {name: value for name, value in kwargs.items() if name != place}
        calls.append(_Call(module, kept, others, place))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        state = state_given(output)
        if len(calls) == transformer.n_layers and state is not None:
            states.append(state.clone())
            if not logits:
                raise _Enough

    output = None
    with ExitStack() as hooks, suppress(_Enough):
        for path in dict.fromkeys(transformer.blocks):
            block = transformer.model.get_submodule(path)
            handle = block.register_forward_pre_hook(before, with_kwargs=True)
            hooks.callback(handle.remove)
            hooks.callback(block.register_forward_hook(after).remove)
        output = transformer.model(**prepare(transformer.model, inputs))
    if len(states) != transformer.n_layers + 1:
        raise ModelRefused(
            f"{len(calls)} blocks ran in this forward pass; {transformer.n_layers} were wanted"
        )
    own = None if output is None else output.logits
    return Recording(transformer, tuple(states), tuple(calls), own)
