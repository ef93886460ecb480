"""Structureless doubles of readings: random walks of logits that step like the model's own.

In: the states of one forward pass, batch by batch. Out: for a sample of its rows, the saturation
layers of a walk that starts where the row starts and whose steps are as large as the row's.

With z[l] a row's logits at layer l less their mean, and a[l] their least-squares slope,
    z[l + 1] = a[l] z[l] + e[l]                    the row: e[l] is its step
    w[l + 1] = a[l] w[l] + shuffled(e[l])          its double, from w[0] = z[0]
Every step is the model's own, large entries included, but falls on tokens at random. So spread
and, on average, correlation from layer to layer are those of the row; all that is lost is which
tokens are moved. Order that the double shows as well is no sign of anything that the model does.
Made in the full vocabulary while the logits are there; nothing V-sized is kept.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.models.transformer import Transformer
from layerleap.read.lens import Lens
from layerleap.read.reader import Rows, Waiting
from layerleap.read.saturation import Saturation, finite_top, require_ranks, saturation_layers
from layerleap.stream.examples import Batch


@dataclass(frozen=True, eq=False)
class Walk:
    """The doubles of some rows of a pass: `saturation` of `rows`, counted over the whole pass."""

    saturation: Saturation  # gold is unknown: a double has no right answer
    rows: Tensor  # (row,)


class Walks:
    """Takes a share of the rows of each batch and lets a double walk beside each.

    `add` is made for `saturate(..., keep_states=walks.add)`: one forward pass serves both.
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
            share: of the rows; a double costs a reading of every layer.
            seed: of which rows are taken and where their steps fall.
        """
        require_ranks(transformer, k)
        if not 0 < share <= 1:
            raise BadSettings(f"share {share} of the rows; above 0 and at most 1 was wanted")
        self.transformer, self.lenses, self.k, self.share = transformer, lenses, k, share
        self.taking = np.random.default_rng(seed)  # its draws do not depend on how rows are cut
        self.shuffling = {name: torch.Generator().manual_seed(seed) for name in lenses}
        self.waiting = Waiting(transformer, self._walk)
        self.seen = 0
        self.origins: list[tuple[Tensor, Tensor, Tensor]] = []
        self.tops: dict[str, list[Tensor]] = {name: [] for name in lenses}

    def add(self, states: Mapping[int, Tensor], batch: Batch) -> None:
        """Take some rows of one batch."""
        n_rows = len(batch.documents)
        taken = torch.from_numpy(self.taking.random(n_rows) < self.share)
        self.seen += n_rows
        if taken.any():
            rows = taken.nonzero()[:, 0] + self.seen - n_rows
            self.origins.append((rows, batch.documents[taken], batch.positions[taken]))
            self.waiting.add({layer: h[taken.to(h.device)] for layer, h in states.items()})

    def results(self) -> dict[str, Walk]:
        """By lens."""
        self.waiting.settle()
        if not self.origins:
            raise BadText(
                f"a share of {self.share} of {self.seen} rows left none for random walks; take a "
                "larger share or read more"
            )
        rows, documents, positions = (
            torch.cat(column) for column in zip(*self.origins, strict=True)
        )
        found = {}
        for name, parts in self.tops.items():
            tops = torch.cat(parts)
            found[name] = Walk(
                Saturation(
                    saturation_layers(tops), tops[:, -1].to(torch.int32),
                    torch.full_like(rows, -1, dtype=torch.int32), documents, positions,
                    self.transformer.n_layers, name,
                ),
                rows,
            )  # fmt: skip
        return found

    @torch.no_grad()
    def _walk(self, rows: Rows) -> None:
        for name, lens in self.lenses.items():
            layers = range(self.transformer.n_layers + 1)
            readings = (lens.logits(rows[layer], layer) for layer in layers)
            said = f"the random walk of lens {name!r} ({lens.name})"
            tops = [
                finite_top(double, self.k, said, layer)
                for layer, double in enumerate(double_of(readings, self.shuffling[name]))
            ]
            self.tops[name].append(torch.stack(tops, dim=1).to(torch.int32))


def double_of(readings: Iterable[Tensor], generator: torch.Generator) -> Iterator[Tensor]:
    """A walk that steps like `readings`, layer by layer: (row, d_vocab) in, (row, d_vocab) out."""
    z = w = None
    for logits in readings:
        now = logits.float()
        now = now - now.mean(-1, keepdim=True)
        if z is None or w is None:
            w = now
        else:
            z, w = z.to(now.device), w.to(now.device)
            size = torch.linalg.vecdot(z, z)
            # All tokens alike at a layer: nothing to carry on, the step is all there is.
            slope = (torch.linalg.vecdot(now, z) / size).where(size > 0, 0.0)[:, None]
            step = torch.addcmul(now, slope, z, value=-1)
            w = torch.addcmul(_shuffled(step, generator), slope, w)
        z = now
        yield w


def _shuffled(steps: Tensor, generator: torch.Generator) -> Tensor:
    """Every row's entries on random tokens: one permutation for all, then a turn for each row."""
    n_rows, d_vocab = steps.shape
    order = torch.randperm(d_vocab, generator=generator).to(steps.device)
    steps = steps.index_select(1, order)
    turns = torch.randint(d_vocab, (n_rows,), generator=generator).tolist()
    for row, turn in zip(steps, turns, strict=True):  # a third of the time of one gather
        row.copy_(row.roll(turn))
    return steps
