"""Activation patching: states, sites, heads or neurons replaced by what they were elsewhere.

In: a place in the model, values, and the positions that they go to. Out: an edit for `model.edit`;
or, from a recorded pass, the states from the first patched layer on.

Patched states are those of the residual stream, before the final norm. Patching in what is there
already changes nothing, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from layerleap.act.edits.places import Side, head_place, site_place, state_place
from layerleap.errors import BadSettings
from layerleap.models.facts import check_number
from layerleap.models.hooks.capture import check_layer
from layerleap.models.hooks.edit import Change, Edit
from layerleap.models.hooks.recording import Recording
from layerleap.models.hooks.rows import Rows
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward


class Patch(Edit):
    """Values put at positions of texts; a subclass says where in the model, and has the fields.

    `VALUES` names the field that holds them, (n, width), or (width,) for one position.
    """

    VALUES: ClassVar[str] = "values"
    positions: Any
    texts: Any

    def __post_init__(self) -> None:
        values = self._values if self._values.dim() == 2 else self._values[None]
        object.__setattr__(self, self.VALUES, values)
        for name in ("positions", "texts"):
            given = getattr(self, name)
            if given is None:
                continue
            numbers = torch.as_tensor(given, dtype=torch.long).cpu()
            numbers = numbers if numbers.dim() else numbers[None]
            object.__setattr__(self, name, numbers)
            if tuple(numbers.shape) != (len(values),):
                raise BadSettings(
                    f"{name} of a patch have shape {tuple(numbers.shape)} and {self.VALUES} "
                    f"{tuple(values.shape)}; expected one of {name} for each {self.VALUES[:-1]}"
                )
            if len(numbers) and int(numbers.min()) < 0:
                raise BadSettings(
                    f"{name} {numbers.tolist()} of a patch; expected numbers from 0 on"
                )
        if len({*zip(*self._places(), strict=True)}) < len(values):
            raise BadSettings(
                f"two {self.VALUES} of one patch go to the same position; give each its own"
            )

    @property
    def _values(self) -> Tensor:
        values: Tensor = getattr(self, self.VALUES)
        return values

    def _places(self) -> tuple[list[int], list[int]]:
        """The text (-1 for every text) and position of each value."""
        texts = [-1] * len(self._values) if self.texts is None else self.texts
        return torch.as_tensor(texts).tolist(), torch.as_tensor(self.positions).tolist()

    def __repr__(self) -> str:
        own = (f.name for f in fields(self) if f.name not in (self.VALUES, "positions", "texts"))  # type: ignore[arg-type]
        where = ", ".join(f"{name}={getattr(self, name)!r}" for name in own)
        texts = "" if self.texts is None else f", texts={self._places()[0]}"
        return f"{type(self).__name__}({where}, positions={self._places()[1]}{texts})"

    def _require_width(self, width: int) -> None:
        if self._values.shape[-1] != width:
            raise BadSettings(
                f"{self.VALUES} of width {self._values.shape[-1]} cannot be patched into this "
                f"model; expected its width, {width}"
            )

    def _put(
        self, columns: slice | list[int], h: Tensor, rows: Callable[[], Rows]
    ) -> tuple[Tensor, int]:
        """The values in the columns of the rows that they go to."""
        here = rows()
        texts, positions = (torch.tensor(values) for values in self._places())
        is_there = here.positions[:, None] == positions
        if self.texts is not None:
            is_there &= here.texts[:, None] == texts
        to, number = is_there.nonzero().T
        if not len(to):
            return h, 0
        changed = h.clone()
        values = self._values[number.to(self._values.device)].to(h.device, h.dtype)
        to = to.to(h.device)
        if isinstance(columns, slice):
            changed[to, columns] = values
        else:
            changed[to[:, None], torch.tensor(columns, device=h.device)] = values
        return changed, len(to)

    def _change(
        self, block: int, module: nn.Module, side: Side, columns: slice | list[int] = slice(None)
    ) -> list[Change]:
        # After hooks of others: `capture` reads there what is put in here.
        outermost = "last" if side == "out" else side
        return [Change(block, module, outermost, partial(self._put, columns))]


@dataclass(frozen=True, eq=False, repr=False)
class PatchState(Patch):
    """Replace h[layer] by states[i] at positions[i] of texts[i].

    Everything after that layer sees the new states, and so does `capture`. Positions count from
    the first token of each text; one that is not in a pass is left for later passes.

        donor = model.capture(inputs, layers=[6]).states[6][0, -1]
        with model.edit(ll.edits.PatchState(6, donor, positions=3)):
            logits = model.model(**others).logits
    """

    VALUES: ClassVar[str] = "states"
    layer: int  # 0 to n_layers
    states: Tensor  # (n, d_model), or (d_model,) for one state
    positions: Tensor | Sequence[int] | int  # (n,)
    texts: Tensor | Sequence[int] | int | None = None  # (n,); every text when None

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the output of the block that makes h[layer]; h[0] is what the first block takes."""
        self._require_width(transformer.d_model)
        return self._change(*state_place(transformer, self.layer))

    def into(self, h: Tensor, recording: Recording) -> Tensor:
        """A copy of h[layer] of a recorded pass, (batch, pos, d_model), with the states in it."""
        if self.states.shape[-1] != h.shape[-1]:
            raise BadSettings(
                f"states of width {self.states.shape[-1]} for a stream of width {h.shape[-1]}"
            )
        rows = recording.origin.rows(h.shape[0] * h.shape[1])
        if recording.order is not None:  # the pass had its padding on the right
            positions = recording.order.restore(rows.positions.view(h.shape[:2]))
            rows = replace(rows, positions=positions.flatten())
        texts, places = self._places()
        ends = {"texts": (texts, rows.texts), "positions": (places, rows.positions)}
        for name, (values, there) in ends.items():
            if values and max(values) > (limit := int(there.max())):
                raise BadSettings(
                    f"{name} {values} of a patch do not all exist; expected 0 to {limit}"
                )
        changed, _ = self._put(slice(None), h.flatten(0, 1), lambda: rows)
        return changed.view_as(h)


@dataclass(frozen=True, eq=False, repr=False)
class PatchSite(Patch):
    """Replace what is at a site of a block by values[i] at positions[i] of texts[i].

    A site is one of `model.sites(block)`; "attn", "cross" and "ffn" are what these parts add to the
    stream, after a norm or scale that follows them.

        donor = model.capture(inputs, sites=[(6, "attn.out")]).sites[6, "attn.out"][0, -1]
        with model.edit(ll.edits.PatchSite(6, "attn.out", donor, positions=3)):
            ...
    """

    block: int  # 1 to n_layers
    site: str
    values: Tensor  # (n, d_model), or (d_model,) for one position
    positions: Tensor | Sequence[int] | int
    texts: Tensor | Sequence[int] | int | None = None

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the module whose input or output is the site."""
        self._require_width(transformer.d_model)
        return self._change(*site_place(transformer, self.block, self.site))


@dataclass(frozen=True, eq=False, repr=False)
class PatchHead(Patch):
    """Replace what one head gives, before the output matrix, at positions of texts.

    donor = model.capture(inputs, heads=[6]).heads[6][0, -1, 3]
    with model.edit(ll.edits.PatchHead(6, 3, donor, positions=3)):
        ...
    """

    block: int  # 1 to n_layers
    head: int  # from 0
    values: Tensor  # (n, width of a head), or (width of a head,)
    positions: Tensor | Sequence[int] | int
    texts: Tensor | Sequence[int] | int | None = None

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the input of the output matrix of attention."""
        module, columns = head_place(transformer, self.block, self.head)
        self._require_width(columns.stop - columns.start)
        return self._change(self.block, module, "in", columns)


@dataclass(frozen=True, eq=False, repr=False)
class PatchNeuron(Patch):
    """Replace the coefficient of one neuron by values[i] at positions[i] of texts[i].

    with model.edit(ll.edits.PatchNeuron(6, 34, torch.tensor([[2.5]]), positions=3)):
        ...
    """

    block: int  # 1 to n_layers
    neuron: int  # from 0
    values: Tensor  # (n, 1)
    positions: Tensor | Sequence[int] | int
    texts: Tensor | Sequence[int] | int | None = None

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the input of the block's down-projection."""
        self._require_width(1)
        ffn = feed_forward(transformer, self.block)
        check_number("neuron", self.neuron, 0, ffn.n_neurons - 1, f"block {self.block}")
        return self._change(self.block, ffn.module(transformer), "in", [self.neuron])


def run_patched(
    recording: Recording, patches: Sequence[PatchState]
) -> Iterator[tuple[int, Tensor]]:
    """(layer, h[layer]) from the first patched layer to the last layer of the model.

    The blocks below ran once, when the pass was recorded. Patches of several layers may be given at
    once: a text without one continues as it was recorded, bit for bit.
    """
    transformer = recording.transformer
    if not patches:
        raise BadSettings("no patches given; expected at least one")
    by_layer: dict[int, list[PatchState]] = {}
    for patch in patches:
        check_layer(transformer, patch.layer)
        by_layer.setdefault(patch.layer, []).append(patch)
    first = min(by_layer)
    h = recording.states[first]
    for layer in range(first, transformer.n_layers + 1):
        if layer > first:
            h = recording.run(h, layer - 1, layer)
        for patch in by_layer.get(layer, ()):
            h = patch.into(h, recording)
        yield layer, h
