"""Structureless doubles of readings: random walks of logits that step like the model's own.

In: all logits of a pass over a text, layer by layer. Out: for a sample of its rows, the saturation
layers of a walk that starts where the row starts and whose steps are as large as the row's.

With z[l] a row's logits at layer l less their mean, and a[l] their least-squares slope,
    z[l + 1] = a[l] z[l] + e[l]                    the row: e[l] is its step
    w[l + 1] = a[l] w[l] + shuffled(e[l])          its double, from w[0] = z[0]
Every step is the model's own, large entries included, but falls on tokens at random. So spread
and, on average, correlation from layer to layer are those of the row; all that is lost is which
tokens are moved. Order that the double shows as well is no sign of anything that the model does.
Made in the full vocabulary while the logits are there; nothing V-sized is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.models.transformer import Transformer
from layerleap.read.lens import Lens
from layerleap.read.saturation import Saturation, finite_top, require_ranks, saturation_layers


@dataclass(frozen=True, eq=False)
class RandomWalk:
    """The doubles of some rows of a pass: `saturation` of `rows`, counted over the whole pass."""

    saturation: Saturation  # gold is unknown: a double has no right answer
    rows: Tensor  # (row,)


class RandomWalks:
    """Takes a share of the rows of a pass and lets a double walk beside each.

    `watch` is made for `score(..., watch=walks.watch)`: one reading of the rows serves both.
    """

    def __init__(
        self,
        transformer: Transformer,
        lenses: Mapping[str, Lens],
        *,
        k: int = 5,
        share: float = 0.1,
        seed: int = 0,
    ) -> None:
        """No row taken yet.

        Args:
            transformer: the model.
            lenses: by name.
            k: how many ranks.
            share: of the rows; a double takes half as long as a reading of every layer.
            seed: of which rows are taken and where their steps fall.
        """
        require_ranks(transformer, k)
        if not 0 < share <= 1:
            raise BadSettings(f"share {share} of the rows; above 0 and at most 1 was wanted")
        self.transformer, self.lenses, self.k, self.share = transformer, lenses, k, share
        self.layers: dict[str, list[Tensor]] = {name: [] for name in lenses}
        self.tokens: dict[str, list[Tensor]] = {name: [] for name in lenses}
        self._taken: list[Tensor] = []  # one mask for every chunk of rows
        # Draws that do not depend on how rows are cut, and are the same for every lens.
        self._taking = np.random.default_rng(seed)
        self._shuffling = {name: torch.Generator().manual_seed(seed) for name in lenses}
        self._double, self._tops = Double(), list[Tensor]()

    def watch(self, way: str, layer: int, logits: Tensor) -> None:
        """Let doubles take the step to one layer; layers come in rising order."""
        if layer == 0:
            if way == next(iter(self.lenses)):
                drawn = self._taking.random(len(logits)) < self.share
                self._taken.append(torch.from_numpy(drawn))
            self._double, self._tops = Double(), []
        taken = self._taken[-1]
        if not taken.any():
            return
        said = f"the random walk of lens {way!r} ({self.lenses[way].name})"
        w = self._double.step(logits[taken.to(logits.device)], self._shuffling[way])
        self._tops.append(finite_top(w, self.k, said, layer))
        if layer == self.transformer.n_layers:
            tops = torch.stack(self._tops, dim=1)
            self.layers[way].append(saturation_layers(tops))
            self.tokens[way].append(tops[:, -1].to(torch.int32))

    def results(self, real: Mapping[str, Saturation]) -> dict[str, RandomWalk]:
        """By lens, beside the rows themselves."""
        rows = torch.cat(self._taken).nonzero()[:, 0]
        if not len(rows):
            raise BadText(
                f"{sum(map(len, self._taken))} rows are too few to take a share of {self.share} of "
                "them for random walks; read more text"
            )
        unknown = torch.full_like(rows, -1, dtype=torch.int32)
        return {
            name: RandomWalk(
                replace(
                    real[name].rows(rows), layer=torch.cat(layers),
                    tokens=torch.cat(self.tokens[name]), gold=unknown,
                ),
                rows,
            )
            for name, layers in self.layers.items()
        }  # fmt: skip


class Double:
    """One walk beside some rows."""

    def __init__(self) -> None:
        self.z: Tensor | None = None  # what the rows said at the layer before, less its mean
        self.w: Tensor | None = None  # and the double

    def step(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Where the double is when the rows say `logits`: (row, d_vocab), its mean 0."""
        now = logits.float()
        now = now - now.mean(-1, keepdim=True)
        if self.z is None or self.w is None:
            self.w = now
        else:
            size = torch.linalg.vecdot(self.z, self.z)
            # All tokens alike at a layer: nothing to carry on, the step is all there is.
            slope = (torch.linalg.vecdot(now, self.z) / size).where(size > 0, 0.0)[:, None]
            step = torch.addcmul(now, slope, self.z, value=-1)
            self.w = torch.addcmul(_shuffled(step, generator), slope, self.w)
        self.z = now
        return self.w


def _shuffled(steps: Tensor, generator: torch.Generator) -> Tensor:
    """Every row's entries on random tokens: one permutation for all, then a turn for each row."""
    n_rows, d_vocab = steps.shape
    order = torch.randperm(d_vocab, generator=generator).to(steps.device)
    steps = steps.index_select(1, order)
    turns = torch.randint(d_vocab, (n_rows,), generator=generator).tolist()
    for row, turn in zip(steps, turns, strict=True):  # a third of the time of one gather
        row.copy_(row.roll(turn))
    return steps
