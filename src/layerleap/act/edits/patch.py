"""States put into the stream: one position of a text goes on from another state.

In: a wrapped model and `Injection`s, each for one layer. Out: the model as it then runs, inside a
`with` block; or, from a recorded pass, the states from the first such layer on.

A state goes in before a block runs, at one position, and as it is: the stream is before the final
norm, and so must the state be. Putting in the state that is there changes nothing, to the bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.trace import state_place, state_taken
from layerleap.models.hooks.recording import Recording
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Injection:
    """States that take the place of h[layer]: states[i] at positions[i] of texts[i]."""

    layer: int
    states: Tensor  # (n, d_model), of the residual stream
    texts: Tensor  # (n,) which texts of the batch
    positions: Tensor  # (n,) which positions of what the model is given

    def __post_init__(self) -> None:
        n = len(self.states) if self.states.dim() == 2 else -1
        for name in ("texts", "positions"):
            value = getattr(self, name)
            if tuple(value.shape) != (n,):
                raise BadSettings(
                    f"{name} of an injection has shape {tuple(value.shape)}, states "
                    f"{tuple(self.states.shape)}; one for each row of states was wanted"
                )
        places = torch.stack([self.texts, self.positions], 1)
        if len(places.unique(dim=0)) < n:
            raise BadSettings("two states of one injection go to the same place; give each its own")

    def into(self, h: Tensor) -> Tensor:
        """A copy of `h`, (batch, pos, d_model), with the states in it."""
        batch, width = h.shape[:2]
        for name, limit in (("texts", batch), ("positions", width)):
            value = getattr(self, name)
            if len(value) and not (int(value.min()) >= 0 and int(value.max()) < limit):
                raise BadSettings(
                    f"{name} {value.tolist()} of an injection are not all in 0 to {limit - 1}"
                )
        if self.states.shape[-1] != h.shape[-1]:
            raise BadSettings(
                f"states of width {self.states.shape[-1]} for a stream of {h.shape[-1]}"
            )
        changed = h.clone()  # not in place: the tensor is the model's own
        place = (self.texts.to(h.device), self.positions.to(h.device))
        return changed.index_put(place, self.states.to(h.device, h.dtype))


@contextmanager
def inject(transformer: Transformer, *injections: Injection) -> Iterator[None]:
    """Inside, every forward pass of the model has `injections` put in before the blocks.

    Everything is as it was on leaving, whatever happened in between. Who reads states in there sees
    what each block gave, so from layer 1 on not yet the states put in before the next one. With a
    cache, positions are counted in what a call of the model is given.
    """
    _require(transformer, injections)
    by_layer = _by_layer(injections)
    done = 0  # blocks entered since the pass began; tells apart the layers of a shared block

    def begin(*_: Any) -> None:
        nonlocal done
        done = 0

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        nonlocal done
        layer, done = done, done + 1
        if layer not in by_layer:
            return None
        place, h = state_place(args, kwargs), state_taken(args, kwargs)
        if place is None or h is None:
            raise ModelRefused("a block was called without a state, so none can take its place")
        for injection in by_layer[layer]:
            h = injection.into(h)
        if isinstance(place, int):
            return (*args[:place], h, *args[place + 1 :]), kwargs
        return args, {**kwargs, place: h}

    with ExitStack() as hooks:
        hooks.callback(transformer.model.register_forward_pre_hook(begin).remove)
        for path in dict.fromkeys(transformer.blocks):
            block = transformer.model.get_submodule(path)
            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield


def run_injected(
    recording: Recording, injections: Sequence[Injection]
) -> Iterator[tuple[int, Tensor]]:
    """(layer, h[layer]) from the first layer of an injection to the last layer of the model.

    The blocks below run only once, when the pass was recorded. Injections of several layers may be
    given at once: a text without one goes on as it was recorded, to the bit.
    """
    transformer = recording.transformer
    _require(transformer, injections)
    by_layer = _by_layer(injections)
    first = min(by_layer)
    h = recording.states[first]
    for layer in range(first, transformer.n_layers + 1):
        if layer > first:
            h = recording.run(h, layer - 1, layer)
        for injection in by_layer.get(layer, ()):
            h = injection.into(h)
        yield layer, h


def _by_layer(injections: Sequence[Injection]) -> dict[int, list[Injection]]:
    found: dict[int, list[Injection]] = {}
    for injection in injections:
        found.setdefault(injection.layer, []).append(injection)
    return found


def _require(transformer: Transformer, injections: Sequence[Injection]) -> None:
    if not injections:
        raise BadSettings("nothing to put into the stream; at least one injection was wanted")
    last = transformer.n_layers - 1
    for injection in injections:
        if not 0 <= injection.layer <= last:
            raise BadSettings(
                f"layer {injection.layer} is not in 0 to {last}: a state goes in before a block "
                "runs, and none runs after the last layer"
            )
