"""Donors, recipients and controls of the intervention, chosen without running the model.

In: saturation layers, and what every layer reads as (`Evidence` of the same rows).
Out: `Pairs` of rows with the same final top token that saturate at different layers, and `Trials`:
which state of which row is patched in before which block, for the donor and for each control.

    donor        the state of the row that saturates earlier, so many layers after it does
    unsaturated  a state of the same layer that reads as the same token with about the same margin,
                 in a row whose top token changes later: all a donor's state has by definition
    random       a random direction, as long as the donor's state
    copy         the state of another row at the same layer, with a different final top token
    no-op        the recipient's own state
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layerleap.act.exits import Evidence
from layerleap.errors import BadSettings, BadText
from layerleap.lens import Saturation

KINDS = ("donor", "unsaturated", "random", "copy", "no-op")
FEWEST = 20  # pairs; a share of fewer says next to nothing
DRAWS = 16  # tries to find a row that meets a condition which sorting cannot


@dataclass(frozen=True)
class PairSettings:
    """Which pairs, and where their states are patched in."""

    offsets: tuple[int, ...]  # layers after the donor's saturation layer
    gap: int  # smallest distance between the two saturation layers
    first: int  # lowest saturation layer of a donor
    near: int | None = None  # same document, and at most so many positions apart
    limit: int = 100  # pairs, at most
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.offsets or 0 not in self.offsets:
            raise BadSettings(f"offsets are {self.offsets}; expected 0 among them")
        if self.gap <= max(self.offsets):
            raise BadSettings(
                f"gap is {self.gap}, so that offset {max(self.offsets)} reaches the recipient's "
                f"own saturation layer; expected more than {max(self.offsets)}"
            )
        if self.first + min(self.offsets) < 1:
            raise BadSettings(
                f"first is {self.first}, so that offset {min(self.offsets)} is below layer 1; "
                f"expected {1 - min(self.offsets)} or more"
            )
        if self.limit < 1:
            raise BadSettings(f"limit is {self.limit}; expected 1 pair or more")

    @classmethod
    def of(
        cls, n_layers: int, *, reach: int = 5, limit: int = 100, seed: int = 0
    ) -> "PairSettings":
        """Offsets of up to 5 layers in deep models, as in the paper, and fewer in others."""
        farthest, gap = (5, 10) if n_layers >= 24 else (3, 5) if n_layers >= 12 else (1, 2)
        reach = min(reach, farthest)
        offsets = tuple(range(-reach, reach + 1))
        return cls(offsets, gap, reach + 1, limit=limit, seed=seed)


class Pairs(NamedTuple):
    """Rows by number: (pair,)."""

    donor: Tensor
    recipient: Tensor
    token: Tensor  # the final top token of both
    start: Tensor  # the donor's saturation layer


class Trials(NamedTuple):
    """What is patched in where: (trial,)."""

    pair: Tensor
    kind: Tensor  # which of KINDS
    offset: Tensor
    layer: Tensor  # before the block that follows it
    source: Tensor  # the row the state is from; for "random", the row whose length it has


def find_pairs(saturation: Saturation, plan: PairSettings) -> Pairs:
    """One random donor for every recipient that has any, up to the limit.

    Rows are sorted by final top token and saturation layer. All donors of a recipient are then
    neighbours, and a binary search finds them.
    """
    s, token = saturation.layer[:, 0].long(), saturation.tokens[:, 0].long()
    position = saturation.positions.long()
    group = token.unique(return_inverse=True)[1]
    if plan.near is not None:
        document = saturation.documents.unique(return_inverse=True)[1]
        group = group * (int(document.max()) + 1) + document
    width = saturation.n_layers + 1
    key, order = (group * width + s).sort(stable=True)
    low = torch.searchsorted(key, group * width + plan.first)
    latest = (s - plan.gap).clamp_min(plan.first - 1)
    count = torch.searchsorted(key, group * width + latest, right=True) - low
    generator = torch.Generator().manual_seed(plan.seed)
    chosen = torch.randperm(len(s), generator=generator)
    chosen = chosen[count[chosen] > 0]
    donor = torch.full((len(chosen),), -1)
    for _ in range(1 if plan.near is None else DRAWS):
        place = (torch.rand(len(chosen), generator=generator) * count[chosen]).long()
        drawn = order[low[chosen] + place]
        is_near = plan.near is None or (position[drawn] - position[chosen]).abs() <= plan.near
        donor = torch.where((donor < 0) & is_near, drawn, donor)
    recipient, donor = chosen[donor >= 0][: plan.limit], donor[donor >= 0][: plan.limit]
    _require_enough(len(recipient), len(s), plan)
    return Pairs(donor, recipient, token[recipient], s[donor])


def _require_enough(pairs: int, rows: int, plan: PairSettings) -> None:
    if pairs >= min(FEWEST, plan.limit):
        return
    needed = (
        f"about {-(-rows * FEWEST // pairs)} rows like these are needed"
        if pairs
        else "far more rows are needed, or a smaller gap"
    )
    raise BadText(
        f"{pairs} pairs among {rows} rows have the same final top token and saturate at least "
        f"{plan.gap} layers apart; expected {FEWEST}: {needed}"
    )


def make_trials(
    saturation: Saturation, evidence: Evidence, pairs: Pairs, plan: PairSettings
) -> Trials:
    """The donor at every offset, and every control at offsets from 0 on where there is one."""
    numbers = torch.arange(len(pairs.donor))
    unsettled = _Unsettled(saturation, evidence)
    generator = torch.Generator().manual_seed(plan.seed + 1)
    parts = []
    for offset in plan.offsets:
        layer = pairs.start + offset
        sources = {"donor": pairs.donor}
        if offset >= 0:
            sources |= {
                "unsaturated": unsettled.nearest(pairs, layer),
                "random": pairs.donor,
                "copy": _others(saturation, pairs, generator),
                "no-op": pairs.recipient,
            }
        for kind, source in sources.items():
            number = torch.full_like(numbers, KINDS.index(kind))
            same = torch.full_like(numbers, offset)
            parts.append(Trials(numbers, number, same, layer, source))
    every = [torch.cat(column) for column in zip(*parts, strict=True)]
    return Trials(*(column[every[-1] >= 0] for column in every))  # where there is a source


def _others(saturation: Saturation, pairs: Pairs, generator: torch.Generator) -> Tensor:
    """For every pair a random row that ends with another token; -1 where none was drawn."""
    token = saturation.tokens[:, 0].long()
    rows = torch.full((len(pairs.donor),), -1)
    for _ in range(DRAWS):
        drawn = torch.randint(len(token), (len(pairs.donor),), generator=generator)
        rows = torch.where((rows < 0) & (token[drawn] != pairs.token), drawn, rows)
    return rows


class _Unsettled:
    """All (row, layer) whose top token still changes afterwards, by layer, token and margin."""

    def __init__(self, saturation: Saturation, evidence: Evidence) -> None:
        layers = torch.arange(saturation.n_layers + 1)
        row, layer = (saturation.layer[:, :1].long() > layers).nonzero(as_tuple=True)
        self.margins = evidence.gap
        self.width = int(evidence.top.max()) + 1
        key = layer * self.width + evidence.top[row, layer].long()
        margin = self.margins[row, layer]
        order = np.lexsort((margin.numpy(), key.numpy()))
        self.key, self.margin = key.numpy()[order], margin.numpy()[order]
        self.row = row.numpy()[order]

    def nearest(self, pairs: Pairs, layer: Tensor) -> Tensor:
        """For each pair the row that reads as its token at `layer` with the donor's margin.

        -1 where there is none except the recipient.
        """
        keys = (layer * self.width + pairs.token).numpy()
        low, high = (np.searchsorted(self.key, keys, side) for side in ("left", "right"))
        margins = self.margins[pairs.donor, layer].numpy()
        rows = torch.full((len(pairs.donor),), -1)
        for pair, (start, stop) in enumerate(zip(low, high, strict=True)):
            at = start + int(np.searchsorted(self.margin[start:stop], margins[pair]))
            close = np.arange(max(start, at - 2), min(stop, at + 2))
            close = close[self.row[close] != int(pairs.recipient[pair])]
            if len(close):
                best = close[np.abs(self.margin[close] - margins[pair]).argmin()]
                rows[pair] = int(self.row[best])
        return rows
