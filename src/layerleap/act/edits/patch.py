"""Activation patching: states of the residual stream replaced by other states.

In: a layer, states, and the positions that they go to. Out: an edit for `model.edit`; or, from a
recorded pass, the states from the first patched layer on.

Patched states are those of the residual stream, before the final norm. Patching in the state that
is there already changes nothing, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.models.hooks.capture import check_layer
from layerleap.models.hooks.edit import Change, Edit
from layerleap.models.hooks.recording import Recording
from layerleap.models.hooks.rows import Rows
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class PatchState(Edit):
    """Replace h[layer] by states[i] at positions[i] of texts[i].

    Everything after that layer sees the new states, and so does `capture`. Positions count from
    the first token of each text; one that is not in a pass is left for later passes.

        donor = model.capture(inputs, layers=[6]).states[6][0, -1]
        with model.edit(ll.edits.PatchState(6, donor, positions=3)):
            logits = model.model(**others).logits
    """

    layer: int  # 0 to n_layers
    states: Tensor  # (n, d_model), or (d_model,) for one state
    positions: Tensor | Sequence[int] | int  # (n,)
    texts: Tensor | Sequence[int] | int | None = None  # (n,); every text when None

    def __post_init__(self) -> None:
        states = self.states if self.states.dim() == 2 else self.states[None]
        object.__setattr__(self, "states", states)
        for name in ("positions", "texts"):
            value = getattr(self, name)
            if value is None:
                continue
            value = torch.as_tensor(value, dtype=torch.long).cpu()
            value = value if value.dim() else value[None]
            object.__setattr__(self, name, value)
            if tuple(value.shape) != (len(states),):
                raise BadSettings(
                    f"{name} of a patch have shape {tuple(value.shape)} and states "
                    f"{tuple(states.shape)}; expected one of {name} for each state"
                )
            if len(value) and int(value.min()) < 0:
                raise BadSettings(f"{name} {value.tolist()} of a patch; expected numbers from 0 on")
        if len({*zip(*self._places(), strict=True)}) < len(states):
            raise BadSettings("two states of one patch go to the same position; give each its own")

    def _places(self) -> tuple[list[int], list[int]]:
        """The text (-1 for every text) and position of each state."""
        texts = [-1] * len(self.states) if self.texts is None else self.texts
        return torch.as_tensor(texts).tolist(), torch.as_tensor(self.positions).tolist()

    def __repr__(self) -> str:
        texts = "" if self.texts is None else f", texts={self._places()[0]}"
        return f"PatchState(layer={self.layer}, positions={self._places()[1]}{texts})"

    def changes(self, transformer: Transformer) -> list[Change]:
        """At the output of the block that makes h[layer]; h[0] is what the first block takes."""
        check_layer(transformer, self.layer)
        if self.states.shape[-1] != transformer.d_model:
            raise BadSettings(
                f"states of width {self.states.shape[-1]} cannot be patched into this model; "
                f"expected its width, {transformer.d_model}"
            )
        if self.layer == 0:
            return [Change(1, transformer.block(1), "in", self._apply)]
        return [Change(self.layer, transformer.block(self.layer), "out", self._apply)]

    def _apply(self, h: Tensor, rows: Callable[[], Rows]) -> tuple[Tensor, int]:
        here = rows()
        texts, positions = (torch.tensor(values) for values in self._places())
        is_there = here.positions[:, None] == positions
        if self.texts is not None:
            is_there &= here.texts[:, None] == texts
        to, number = is_there.nonzero().T
        if not len(to):
            return h, 0
        states = self.states[number.to(self.states.device)].to(h.device, h.dtype)
        return h.index_put((to.to(h.device),), states), len(to)

    def into(self, h: Tensor) -> Tensor:
        """A copy of `h`, (batch, pos, d_model), with the states in it."""
        batch, width = h.shape[:2]
        texts, positions = self._places()
        for name, values, limit in (("texts", texts, batch), ("positions", positions, width)):
            if values and max(values) >= limit:
                raise BadSettings(
                    f"{name} {values} of a patch do not all exist; expected 0 to {limit - 1}"
                )
        if self.states.shape[-1] != h.shape[-1]:
            raise BadSettings(
                f"states of width {self.states.shape[-1]} for a stream of width {h.shape[-1]}"
            )
        every = torch.cartesian_prod(torch.arange(batch), torch.arange(width))
        rows, _ = self._apply(h.flatten(0, 1), lambda: Rows(every[:, 0], every[:, 1]))
        return rows.view_as(h)


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
            h = patch.into(h)
        yield layer, h
