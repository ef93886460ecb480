"""Gradients of a lesson's loss: of the whole model, or of each block by its own loss.

In: a wrapped model, parameters as tensors by name, and a `Lesson`.
Out: `Gradients`: one tensor per parameter, and the losses.

    full           L = CE(tail(h[n_layers])): plain back-propagation through all blocks
    layer-causal   L_l = CE(tail(map(h[l]))), h[l] = block_l(detached h[l - 1]), summed over l

The map is the identity (the logit lens, as in arXiv 2311.07772), or the one of a bank. In the
second way a block's gradient depends on this block and those below it, never on a later one.

Every block is back-propagated as soon as it has run, so memory is that of one block. Logits are
made for a few rows at a time and their gradient is softmax(z) - target, so one chunk of logits is
all that is held of them. Only while texts are so short that several layers fit into one chunk do
their blocks wait for each other: the head is then read once for all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from layerleap.act.fine_tuning import How, check_share
from layerleap.act.learning.lessons import Lesson
from layerleap.act.learning.parameters import Chosen
from layerleap.errors import BadSettings, ModelRefused, NotFinite, WrongModel, check_choice
from layerleap.lens.lens import Lens
from layerleap.memory import rows_at_once
from layerleap.models.discovery.probe import prepare
from layerleap.models.discovery.trace import required_state, state_given, with_state
from layerleap.models.hooks.forward import Args, Forward, Kwargs, StopPass, Tap, tapped
from layerleap.models.hooks.parameters import computing_with
from layerleap.models.inputs import run
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False, repr=False)
class Gradients:
    """Gradients by parameter name, and mean losses in nats by layer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


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
    take: Callable[[str, Tensor], None] | None = None,
) -> Gradients:
    """The gradients of the chosen parameters at `values`; the model is left as it is.

    Args:
        values: the parameters to compute with, by name, in the dtype of the model.
        lens: reads every layer, for "layer-causal"; the logit lens when None.
        share: of the rows that the losses of all layers but the last are computed on, resampled
            for each layer by `seed`. The expected gradient is that of all rows.
        take: called with each gradient as soon as it is complete, instead of collecting them all:
            in layer-causal learning block by block. It may change the value in place.
    """
    check_choice(how, How, "how")
    check_share(how, share, has_lens=lens is not None)
    check_lens(transformer, lens)
    learns = set(chosen.names)
    leaves = {name: v.detach().requires_grad_(name in learns) for name, v in values.items()}
    run_ = _Run(transformer, chosen, leaves, lesson, lens or Lens(transformer), share, seed, take)
    with computing_with(transformer, leaves):
        return run_.full() if how == "full" else run_.layer_causal()


def check_lens(transformer: Transformer, lens: Lens | None) -> None:
    """Refuse a lens of another model: it would read the losses with other weights."""
    if lens is None or lens.transformer is transformer:
        return
    lens.transformer.refresh()
    transformer.refresh()
    read, learning = lens.transformer.identity, transformer.identity
    if read.fingerprint != learning.fingerprint:
        raise WrongModel(
            f"the lens reads {read.name} ({read.fingerprint}), but {learning.name} "
            f"({learning.fingerprint}) is to learn; make a lens of this model: ll.Lens(model, bank)"
        )


@dataclass(frozen=True, eq=False)
class _Pending:
    """A layer whose block has run and waits for its loss."""

    layer: int
    h: Tensor  # (batch, pos, d_model), with the graph of its block
    names: tuple[str, ...]  # the parameters in that graph
    rows: Tensor  # which rows of the lesson count
    weights: Tensor
    x: Tensor  # (row, d_model): the state at those rows, detached
    at_x: Tensor  # the gradient there, once it is known


@dataclass(eq=False)
class _Run:
    """One pass, and the gradients it gives."""

    transformer: Transformer
    chosen: Chosen
    leaves: Mapping[str, Tensor]
    lesson: Lesson
    lens: Lens
    share: float
    seed: int
    take: Callable[[str, Tensor], None] | None
    layer: int = 0  # blocks that have run
    pending: list[_Pending] = field(default_factory=list)
    n_taken: int = 0  # gradients that were handed out
    result: Gradients = field(default_factory=Gradients)

    @cached_property
    def outside(self) -> tuple[str, ...]:
        """The parameters of embeddings, final norm and head."""
        return self.chosen.of_block(0)

    def full(self) -> Gradients:
        """One backward pass through all blocks."""
        last = self.transformer.n_layers

        def see(output: Any) -> None:
            self._add_layer(last, _state(output), self.chosen.names)
            raise StopPass

        self._run([(self.transformer.block(last), Tap(see_output=see))])
        self._flush()
        return self._finished()

    def layer_causal(self) -> Gradients:
        """Each block on its own, as soon as it has run."""
        blocks = self.transformer.block_modules()
        with torch.no_grad():
            self._run([(block, Tap(around=self._block)) for block in blocks])
        return self._finished()

    def _run(self, taps: list[tuple[Any, Tap]]) -> None:
        arguments = prepare(self.transformer.model, self.lesson.inputs)
        with tapped(self.transformer.model, taps), suppress(StopPass):
            run(self.transformer, arguments)

    def _block(self, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run one block on a detached state; its loss is run backwards as soon as that pays."""
        self.layer += 1
        names = (*self.chosen.of_block(self.layer), *self.outside)
        place, state = required_state(args, kwargs)
        args, kwargs = with_state(args, kwargs, place, state.detach())
        last = self.layer == self.transformer.n_layers
        if last:
            self._flush()  # the last layer alone, as in plain back-propagation
        if names:
            with torch.enable_grad():
                output = forward(*args, **kwargs)
                self._add_layer(self.layer, _state(output), names)
            output = _detached(output)
        elif not last:
            output = forward(*args, **kwargs)
        # Blocks wait while they are short, so that a pass through the head serves several.
        waiting = sum(one.h.shape[:2].numel() for one in self.pending)
        if last or waiting >= rows_at_once(self.transformer.d_vocab):
            self._flush()
        if last:
            raise StopPass
        return output

    def _add_layer(self, layer: int, h: Tensor, names: tuple[str, ...]) -> None:
        rows, weights = self._rows(layer)
        x = h.detach()[self.lesson.keep.to(h.device)][rows.to(h.device)]
        self.pending.append(_Pending(layer, h, names, rows, weights, x, torch.zeros_like(x)))

    def _rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """The rows whose loss counts at a layer, and their weights."""
        weights, n = self.lesson.weights, len(self.lesson.targets)
        if self.share == 1.0 or layer == self.transformer.n_layers:
            return torch.arange(n), weights
        generator = torch.Generator().manual_seed(self.seed * 1009 + layer)
        size = max(1, round(self.share * n))
        rows = torch.randperm(n, generator=generator)[:size].sort().values
        return rows, weights[rows] * (n / size)

    def _flush(self) -> None:
        """Run the losses of all waiting layers backwards, through head and blocks."""
        with torch.enable_grad():
            for parts in _chunks(self.pending, self.transformer.d_vocab):
                self._head(parts)
            while self.pending:
                one = self.pending.pop(0)  # and with it the graph of its block
                self._backward(one)
                self._give([name for name in one.names if self.chosen.blocks[name]])

    def _give(self, names: Iterable[str]) -> None:
        """Hand out gradients to which no later layer adds."""
        if self.take is not None:
            self._check_losses()
            with torch.no_grad():
                for name in names:
                    if name in self.result.tensors:
                        self.take(name, self.result.tensors.pop(name))
                        self.n_taken += 1

    def _head(self, parts: list[tuple[_Pending, slice]]) -> None:
        """The losses of some rows, their gradient there, and that of the tail's weights."""
        xs = [one.x[part].detach().requires_grad_() for one, part in parts]
        carried = [self.lens.map(one.layer)(x) for (one, _), x in zip(parts, xs, strict=True)]
        device = carried[-1].device
        z = self.transformer.logits(torch.cat([rows.to(device) for rows in carried]))
        targets = torch.cat([self.lesson.targets[one.rows[part]] for one, part in parts])
        weights = torch.cat([one.weights[part] for one, part in parts])
        losses, at_z = _cross_entropy(z.detach(), targets.to(z.device), weights.to(z.device))
        outside = [self.leaves[name] for name in self.outside]
        at_inputs = torch.autograd.grad(z, [*xs, *outside], at_z.to(z.dtype), allow_unused=True)
        row_losses = losses.split([len(x) for x in xs])
        for (one, part), at_x, loss in zip(parts, at_inputs[: len(xs)], row_losses, strict=True):
            one.at_x[part] = at_x
            known = self.result.losses.get(one.layer, 0.0)
            self.result.losses[one.layer] = known + loss.sum().item()
        self._add(self.outside, at_inputs[len(xs) :])

    def _backward(self, one: _Pending) -> None:
        """Carry the gradient of a layer's state to the parameters that made it."""
        if not one.h.requires_grad:
            return
        keep = self.lesson.keep.to(one.h.device)
        at_rows = one.x.new_zeros(len(self.lesson.targets), one.x.shape[1])
        at_rows[one.rows.to(at_rows.device)] = one.at_x
        at_h = torch.zeros_like(one.h)
        at_h[keep] = at_rows
        leaves = [self.leaves[name] for name in one.names]
        self._add(one.names, torch.autograd.grad(one.h, leaves, at_h, allow_unused=True))

    def _add(self, names: Sequence[str], values: Sequence[Tensor | None]) -> None:
        for name, value in zip(names, values, strict=True):
            if value is not None:
                value, before = self.chosen.masked(name, value), self.result.tensors.get(name)
                self.result.tensors[name] = value if before is None else before + value

    def _check_losses(self) -> None:
        if bad := [layer for layer, loss in self.result.losses.items() if loss - loss != 0]:
            raise NotFinite(
                f"the loss at layer {bad[0]} is NaN or infinite; lower the learning rate, or use a "
                "wider dtype"
            )

    def _finished(self) -> Gradients:
        self._check_losses()
        self._give(self.outside)
        if not self.result.tensors and not self.n_taken:
            raise BadSettings(
                f"none of the chosen parameters ({', '.join(self.chosen.words)}) gets a gradient"
            )
        if self.take is None:
            for name in self.chosen.names:  # an embedding, in layer-causal learning
                self.result.tensors.setdefault(name, torch.zeros_like(self.leaves[name].detach()))
        return self.result


def _chunks(pending: list[_Pending], d_vocab: int) -> Iterator[list[tuple[_Pending, slice]]]:
    """The rows of the layers, as many at a time as the budget of logits allows."""
    size = rows_at_once(d_vocab)
    parts: list[tuple[_Pending, slice]] = []
    room = size
    for one in pending:
        start = 0
        while start < len(one.x):
            stop = min(len(one.x), start + room)
            parts.append((one, slice(start, stop)))
            room, start = room - (stop - start), stop
            if not room:
                yield parts
                parts, room = [], size
    if parts:
        yield parts


@torch.no_grad()
def _cross_entropy(z: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted loss of each row in nats, and its gradient at the logits."""
    wide = torch.promote_types(z.dtype, torch.float32)
    log_p = z.log_softmax(-1, dtype=wide)
    chosen = log_p.gather(1, targets[:, None])
    losses = -chosen[:, 0].double() * weights
    at_logits = log_p.exp_()
    at_logits.scatter_add_(1, targets[:, None], torch.full_like(chosen, -1.0))
    return losses, at_logits.mul_(weights.to(wide)[:, None])


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
