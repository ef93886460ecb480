"""Random walks of logits as a null model for saturation: the model's steps on random tokens.

In: all logits of a pass over a text, layer by layer. Out: for a sample of its rows, the saturation
layers of a walk that starts at the row's own logits and takes steps of the same size.

With z[l] a row's logits at layer l minus their mean, and a[l] the least-squares slope,
    z[l + 1] = a[l] z[l] + e[l]                    the row: e[l] is its step
    w[l + 1] = a[l] w[l] + shuffled(e[l])          its random walk, from w[0] = z[0]
Every step has exactly the entries of the model's step, but on random tokens. Spread and, on
average, correlation between layers match the row; only the choice of tokens is lost. Order that
the walk shows too is therefore no evidence for the model. Walks use the full vocabulary while the
logits exist; nothing V-sized is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.lens.lens import Lens
from layerleap.lens.readings import saturation_layers
from layerleap.lens.saturation import Saturation, finite_top, require_ranks
from layerleap.models.transformer import Transformer
from layerleap.short_repr import ShortRepr


@dataclass(frozen=True, eq=False, repr=False)
class RandomWalk(ShortRepr):
    """The random walks of some rows: their `saturation`, and the rows' numbers in the pass."""

    saturation: Saturation  # gold is unknown: a walk has no correct output
    rows: Tensor  # (row,)


class RandomWalks:
    """Samples a share of the rows of a pass and runs a random walk beside each.

    Pass `on_logits` to `score`, so that one reading of the rows serves both.
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
        """Start without rows.

        Args:
            share: share of the rows; a walk takes half as long as reading every layer.
            seed: decides which rows are sampled and how steps are shuffled.
        """
        require_ranks(transformer, k)
        if not 0 < share <= 1:
            raise BadSettings(f"share {share} is out of range; expected above 0 and at most 1")
        self.transformer, self.lenses, self.k, self.share = transformer, lenses, k, share
        self.layers: dict[str, list[Tensor]] = {name: [] for name in lenses}
        self.tokens: dict[str, list[Tensor]] = {name: [] for name in lenses}
        self._sampled: list[Tensor] = []  # one mask per chunk of rows
        # The draws do not depend on chunk sizes and are the same for every lens.
        self._sampling = np.random.default_rng(seed)
        self._shuffling = {name: torch.Generator().manual_seed(seed) for name in lenses}
        self._walk, self._tops = Walk(), list[Tensor]()

    def on_logits(self, name: str, layer: int, logits: Tensor) -> None:
        """Advance the walks by one layer; layers come in ascending order."""
        if layer == 0:
            if name == next(iter(self.lenses)):
                is_sampled = self._sampling.random(len(logits)) < self.share
                self._sampled.append(torch.from_numpy(is_sampled))
            self._walk, self._tops = Walk(), []
        sampled = self._sampled[-1]
        if not sampled.any():
            return
        label = f"the random walk of lens {name!r} ({self.lenses[name].name})"
        w = self._walk.step(logits[sampled.to(logits.device)], self._shuffling[name])
        self._tops.append(finite_top(w, self.k, label, layer))
        if layer == self.transformer.n_layers:
            tops = torch.stack(self._tops, dim=1)
            self.layers[name].append(saturation_layers(tops))
            self.tokens[name].append(tops[:, -1].to(torch.int32))

    def results(self, real: Mapping[str, Saturation]) -> dict[str, RandomWalk]:
        """The walks by lens; `real` holds the saturation layers of all rows."""
        rows = torch.cat(self._sampled).nonzero()[:, 0]
        if not len(rows):
            raise BadText(
                f"{sum(map(len, self._sampled))} rows are too few to sample a share of "
                f"{self.share} for random walks; read more text"
            )
        unknown, walks = torch.full_like(rows, -1, dtype=torch.int32), {}
        for name, layers in self.layers.items():
            layer, tokens = torch.cat(layers), torch.cat(self.tokens[name])
            sampled = replace(real[name].rows(rows), layer=layer, tokens=tokens, gold=unknown)
            walks[name] = RandomWalk(sampled, rows)
        return walks


class Walk:
    """One random walk per row."""

    def __init__(self) -> None:
        self.z: Tensor | None = None  # the rows' logits at the previous layer, minus their mean
        self.w: Tensor | None = None  # the walk

    def step(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """The walk at the layer where the rows have `logits`: (row, d_vocab), with mean 0."""
        now = logits.float()
        now = now - now.mean(-1, keepdim=True)
        if self.z is None or self.w is None:
            self.w = now
        else:
            size = torch.linalg.vecdot(self.z, self.z)
            # If all logits are equal there is nothing to scale: the step is everything.
            slope = (torch.linalg.vecdot(now, self.z) / size).where(size > 0, 0.0)[:, None]
            step = torch.addcmul(now, slope, self.z, value=-1)
            self.w = torch.addcmul(_shuffled(step, generator), slope, self.w)
        self.z = now
        return self.w


def _shuffled(steps: Tensor, generator: torch.Generator) -> Tensor:
    """Each row's entries on random tokens: one permutation for all, then a rotation per row."""
    n_rows, d_vocab = steps.shape
    order = torch.randperm(d_vocab, generator=generator).to(steps.device)
    steps = steps.index_select(1, order)
    turns = torch.randint(d_vocab, (n_rows,), generator=generator).tolist()
    for row, turn in zip(steps, turns, strict=True):  # takes a third of the time of one gather
        row.copy_(row.roll(turn))
    return steps
