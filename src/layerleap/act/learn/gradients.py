"""Gradients of a lesson's loss: of the whole model, or of each block by its own loss.

In: a wrapped model, parameters as tensors by name, and a `Lesson`.
Out: `Gradients`: one tensor per parameter, and the losses.

    full           L = CE(tail(h[n_layers])): plain back-propagation through all blocks
    layer-causal   L_l = CE(tail(map(h[l]))), h[l] = block_l(detached h[l - 1]), summed over l

The map is the identity (the logit lens, as in arXiv 2311.07772), or the one of a bank. In the
second way a block's gradient depends on this block and those below it, never on a later one.

Every block is back-propagated as soon as it has run, so memory is that of one block. Logits are
made for a few rows at a time and their gradient is softmax(z) - target, so one chunk of logits is
all that is held of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.act.learn.lessons import Lesson
from layerleap.act.learn.parameters import Chosen
from layerleap.errors import BadSettings, ModelRefused, NotFinite, check_choice
from layerleap.models.discovery.probe import prepare
from layerleap.models.discovery.trace import required_state, state_given, with_state
from layerleap.models.hooks.forward import Args, Forward, Kwargs, StopPass, Tap, tapped
from layerleap.models.hooks.parameters import computing_with
from layerleap.models.inputs import run
from layerleap.models.transformer import Transformer
from layerleap.read.lens import Lens, chunks

How = Literal["full", "layer-causal"]


@dataclass(frozen=True, eq=False, repr=False)
class Gradients:
    """Gradients by parameter name, and mean losses in nats by layer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The loss of the model's own output; NaN if no block needed it."""
        return self.losses.get(max(self.losses, default=0), float("nan"))


def gradients(
    transformer: Transformer,
    chosen: Chosen,
    values: Mapping[str, Tensor],
    lesson: Lesson,
    *,
    how: How,
    lens: Lens | None = None,
    share: float = 1.0,
    seed: int = 0,
) -> Gradients:
    """The gradients of the chosen parameters at `values`; the model is left as it is.

    Args:
        values: the parameters to compute with, by name, in the dtype of the model.
        lens: reads every layer, for "layer-causal"; the logit lens when None.
        share: of the rows that the losses of all layers but the last are computed on, drawn anew
            for each layer by `seed`. The expected gradient is that of all rows.
    """
    check_choice(how, How, "how")
    if not 0 < share <= 1:
        raise BadSettings(f"share is {share}; expected more than 0 and at most 1")
    if how == "full" and (lens is not None or share != 1.0):
        raise BadSettings("a lens and a share of the rows are for how='layer-causal' alone")
    learns = set(chosen.names)
    leaves = {name: v.detach().requires_grad_(name in learns) for name, v in values.items()}
    run_ = _Run(transformer, chosen, leaves, lesson, lens or Lens(transformer), share, seed)
    with computing_with(transformer, leaves):
        return run_.full() if how == "full" else run_.layer_causal()


class _Run:
    """One pass, and the gradients it gives."""

    def __init__(
        self, transformer: Transformer, chosen: Chosen, leaves: Mapping[str, Tensor],
        lesson: Lesson, lens: Lens, share: float, seed: int,
    ) -> None:  # fmt: skip
        self.transformer, self.chosen, self.leaves, self.lens = transformer, chosen, leaves, lens
        self.lesson, self.share, self.seed = lesson, share, seed
        self.outside = chosen.of_block(0)  # embeddings, final norm, head
        self.layer = 0  # blocks that have run
        self.result = Gradients()

    def full(self) -> Gradients:
        """One backward pass through all blocks."""
        last, seen = self.transformer.n_layers, []

        def see(output: Any) -> None:
            seen.append(_state(output))
            raise StopPass

        self._run([(self.transformer.block(last), Tap(see_output=see))])
        self._backward(last, seen[0], self.chosen.names)
        return self._finished()

    def layer_causal(self) -> Gradients:
        """Each block on its own, as soon as it has run."""
        taps = [(block, Tap(around=self._block)) for block in self.transformer.block_modules()]
        with torch.no_grad():
            self._run(taps)
        return self._finished()

    def _run(self, taps: list[tuple[Any, Tap]]) -> None:
        arguments = prepare(self.transformer.model, self.lesson.inputs)
        with tapped(self.transformer.model, taps), suppress(StopPass):
            run(self.transformer, arguments)

    def _block(self, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run one block on a detached state, and its loss backwards at once."""
        self.layer += 1
        names = (*self.chosen.of_block(self.layer), *self.outside)
        place, state = required_state(args, kwargs)
        args, kwargs = with_state(args, kwargs, place, state.detach())
        if not names:
            return forward(*args, **kwargs)
        with torch.enable_grad():
            output = forward(*args, **kwargs)
            self._backward(self.layer, _state(output), names)
        if self.layer == self.transformer.n_layers:
            raise StopPass
        return _detached(output)

    def _backward(self, layer: int, h: Tensor, names: tuple[str, ...]) -> None:
        """Add the gradients of one layer's loss to the parameters that made its state."""
        rows, weights = self._rows(layer, len(self.lesson.targets))
        at = self.lesson.keep.to(h.device)
        loss, at_rows, at_outside = self._head(layer, h.detach()[at][rows], rows, weights)
        self.result.losses[layer] = loss
        for name, value in at_outside.items():
            self._add(name, value)
        if not h.requires_grad:
            return
        at_state = torch.zeros_like(h)
        at_all = at_state.new_zeros(len(self.lesson.targets), h.shape[-1])
        at_all[rows] = at_rows
        at_state[at] = at_all
        leaves = [self.leaves[name] for name in names]
        found = torch.autograd.grad(h, leaves, at_state, allow_unused=True)
        for name, value in zip(names, found, strict=True):
            if value is not None:
                self._add(name, value)

    def _rows(self, layer: int, n: int) -> tuple[Tensor, Tensor]:
        """The rows whose loss counts at a layer, and their weights."""
        weights = self.lesson.weights
        if self.share == 1.0 or layer == self.transformer.n_layers:
            return torch.arange(n), weights
        generator = torch.Generator().manual_seed(self.seed * 1009 + layer)
        size = max(1, round(self.share * n))
        rows = torch.randperm(n, generator=generator)[:size].sort().values
        return rows, weights[rows] * (n / size)

    def _head(
        self, layer: int, h: Tensor, rows: Tensor, weights: Tensor
    ) -> tuple[float, Tensor, dict[str, Tensor]]:
        """The loss of some rows of a layer, its gradient there, and that of the tail's weights."""
        carry, outside = self.lens.map(layer), {n: self.leaves[n] for n in self.outside}
        total, at_rows = 0.0, torch.empty_like(h)
        at_outside: dict[str, Tensor] = {}
        for part in chunks(len(h), self.transformer.d_vocab):
            x = h[part].detach().requires_grad_()
            z = self.transformer.logits(carry(x))
            targets = self.lesson.targets[rows[part]].to(z.device)
            weight = weights[part].to(z.device)
            loss, at_logits = _cross_entropy(z.detach(), targets, weight)
            total += loss
            found = torch.autograd.grad(
                z, [x, *outside.values()], at_logits.to(z.dtype), allow_unused=True
            )
            at_rows[part] = found[0]
            for name, value in zip(outside, found[1:], strict=True):
                if value is not None:
                    at_outside[name] = at_outside[name] + value if name in at_outside else value
        return total, at_rows, at_outside

    def _add(self, name: str, value: Tensor) -> None:
        value = self.chosen.masked(name, value)
        before = self.result.tensors.get(name)
        self.result.tensors[name] = value if before is None else before + value

    def _finished(self) -> Gradients:
        if bad := [layer for layer, loss in self.result.losses.items() if loss - loss != 0]:
            raise NotFinite(
                f"the loss at layer {bad[0]} is NaN or infinite; lower the learning rate, or use a "
                "wider dtype"
            )
        if not self.result.tensors:
            raise BadSettings(
                f"none of the chosen parameters ({', '.join(self.chosen.words)}) gets a gradient"
            )
        for name in self.chosen.names:  # an embedding, in layer-causal learning
            self.result.tensors.setdefault(name, torch.zeros_like(self.leaves[name].detach()))
        return self.result


@torch.no_grad()
def _cross_entropy(z: Tensor, targets: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """The weighted loss in nats, and its gradient at the logits, in float32 or wider."""
    wide = torch.promote_types(z.dtype, torch.float32)
    log_p = z.log_softmax(-1, dtype=wide)
    chosen = log_p.gather(1, targets[:, None])
    loss = -(chosen[:, 0].double() * weights).sum().item()
    at_logits = log_p.exp_()
    at_logits.scatter_add_(1, targets[:, None], torch.full_like(chosen, -1.0))
    return loss, at_logits.mul_(weights.to(wide)[:, None])


def _state(output: Any) -> Tensor:
    state = state_given(output)
    if state is None:
        raise ModelRefused("a block returned no state to learn from")
    return state


def _detached(output: Any) -> Any:
    """The same output without its graph, which would keep the block's activations."""
    if isinstance(output, Tensor):
        return output.detach()
    if isinstance(output, tuple | list):
        return type(output)(_detached(item) for item in output)
    if isinstance(output, Mapping):
        make: Any = type(output)
        return make({key: _detached(item) for key, item in output.items()})
    return output


def zeros_like(values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Zeros in float32 or wider, to add steps to."""
    for name, value in values.items():
        wide = torch.promote_types(value.dtype, torch.float32)
        yield name, torch.zeros_like(value, dtype=wide)
