"""What one model shows of one text: everything that the study of saturation is made from.

In: a wrapped model, lenses, and a way to make the same batches again.
Out: `SaturationData`: saturation layers, random walks, evidence and states, all of the same rows
in the same order. States are written to a file, 4 bytes per number: 71 kB per row for 30 layers
of width 576.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerleap.act.exits.evidence import Evidence
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.read.lens import Lens
from layerleap.read.probes.task import States
from layerleap.read.random_walks import RandomWalk, RandomWalks
from layerleap.read.saturation import Saturation, SaturationObserver
from layerleap.read.scores import score
from layerleap.stats.saved_states import StateFile, StateWriter
from layerleap.stream.examples import Batch

EVERY = 2**40  # rows are never so many: all are kept, in their order
Batches = Callable[[], Iterator[Batch]]


@dataclass(frozen=True, eq=False)
class SaturationData:
    """One model on one text; mappings are by lens."""

    transformer: Transformer
    lenses: Mapping[str, Lens]
    saturation: Mapping[str, Saturation]
    walks: Mapping[str, RandomWalk]
    evidence: Mapping[str, Evidence]
    states: States
    batches: Batches  # makes them again, in the same order

    @property
    def gold(self) -> Tensor:
        """(row,) the right answer, -1 where it is unknown."""
        return next(iter(self.saturation.values())).gold


class SomeStates:
    """The states of some rows of others, by number."""

    def __init__(self, whole: States, chosen: Tensor) -> None:
        self.whole, self.chosen = whole, chosen
        self.n_layers, self.d_model, self.model = whole.n_layers, whole.d_model, whole.model

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def documents(self) -> Tensor:
        """(row,)."""
        return self.whole.documents[self.chosen]

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        """h[layers[i]] of row rows[i]: (cell, d_model)."""
        return self.whole.cells(self.chosen[rows], layers)


def observe(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    batches: Batches,
    file: Path,
    *,
    k: int,
    walk_share: float,
    seed: int = 0,
    progress: Progress = silent,
    total: int | None = None,
    phase: str = "reading",
) -> SaturationData:
    """Read the batches once, and every row at every layer: all else is made from its logits.

    Args:
        transformer: the model.
        lenses: by name.
        batches: makes the same batches whenever it is called.
        file: where states are spilled to.
        k: how many ranks.
        walk_share: the share of rows that random walks are made beside.
        seed: of the walks.
        progress: told the number of texts.
        total: how many texts there will be, if known.
        phase: what progress calls it.
    """
    ranks = SaturationObserver(transformer, lenses, k)
    walks = RandomWalks(transformer, lenses, k=k, share=walk_share, seed=seed)
    target = StateFile(file, EVERY, seed)
    target.remove()
    writer = StateWriter(target, transformer, 0)

    def keep(states: Mapping[int, Tensor], batch: Batch) -> None:
        ranks.add_batch(batch)
        writer.add([states[layer] for layer in sorted(states)], batch.documents)

    def on_logits(name: str, layer: int, logits: Tensor) -> None:
        ranks.on_logits(name, layer, logits)
        walks.on_logits(name, layer, logits)

    with closing(writer):
        scores = score(
            transformer, lenses, batches(), on_states=keep, on_logits=on_logits,
            progress=progress, total=total, phase=phase,
        )  # fmt: skip
    writer.finish()
    found = ranks.results()
    return SaturationData(
        transformer, lenses, found, walks.results(found),
        {name: Evidence.of(scores, name) for name in lenses}, target.open(), batches,
    )  # fmt: skip


def numbers(mask: Tensor) -> Tensor:
    """Which rows a mask holds."""
    return torch.nonzero(mask)[:, 0]
