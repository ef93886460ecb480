"""One pass over a text, and everything that the saturation study makes from it.

In: a wrapped model, lenses, and a way to make the same batches again.
Out: `SaturationData`: saturation layers, random walks, evidence and states of the same rows, in the
same order. States are written to a file, 4 bytes per number: 71 kB per row for 30 layers of width
576.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from layerleap import Lens, Transformer
from layerleap.act.exits import Evidence
from layerleap.files import read_json, write_json
from layerleap.lens import (
    RandomWalk,
    RandomWalks,
    Saturation,
    SaturationObserver,
    Scores,
    States,
    score,
)
from layerleap.progress import Progress, silent
from layerleap.stats import StateFile, StateWriter
from layerleap.stream import Batch

NO_LIMIT = 2**40  # more rows than any text has: all are kept, in their order
Batches = Callable[[], Iterator[Batch]]


@dataclass(frozen=True, eq=False)
class SaturationData:
    """One model on one text; mappings are by lens."""

    transformer: Transformer
    lenses: Mapping[str, Lens]
    saturation: Mapping[str, Saturation]
    walks: Mapping[str, RandomWalk]
    scores: Scores
    states: States
    batches: Batches  # makes them again, in the same order

    @cached_property
    def evidence(self) -> dict[str, Evidence]:
        """What exit rules may look at."""
        return {name: Evidence.from_scores(self.scores, name) for name in self.lenses}

    @property
    def gold(self) -> Tensor:
        """(row,) the right answer, -1 where it is unknown."""
        return next(iter(self.saturation.values())).gold

    def save(self, path: Path) -> None:
        """Write everything but the states, which have a file of their own, beside `path`.

        The JSON file comes last: without it the rest is incomplete, and is not read.
        """
        self.scores.save(path.with_suffix(".scores"))
        for name in self.lenses:
            self.saturation[name].save(path.with_suffix(f".{name}"))
            self.walks[name].saturation.save(path.with_suffix(f".{name}-walk"))
        rows = next(iter(self.walks.values())).rows
        write_json(path.with_suffix(".json"), {"walk_rows": rows.tolist()})

    @classmethod
    def load(
        cls, path: Path, transformer: Transformer, lenses: Mapping[str, Lens], batches: Batches
    ) -> "SaturationData":
        """Read what `save` wrote; `BadArtifact` if it is missing or incomplete."""
        rows = torch.tensor(read_json(path.with_suffix(".json"))["walk_rows"])
        load = Saturation.load
        return cls(
            transformer,
            lenses,
            {name: load(path.with_suffix(f".{name}")) for name in lenses},
            {n: RandomWalk(load(path.with_suffix(f".{n}-walk")), rows) for n in lenses},
            Scores.load(path.with_suffix(".scores")),
            StateFile(path, NO_LIMIT).open(),
            batches,
        )


class SomeStates:
    """The states of some of the rows, chosen by number."""

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
    """Run the model over the batches once, read every row at every layer, and keep its states.

    `walk_share` of the rows get random walks.
    """
    ranks = SaturationObserver(transformer, lenses, k)
    walks = RandomWalks(transformer, lenses, k=k, share=walk_share, seed=seed)
    target = StateFile(file, NO_LIMIT, seed)
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
            transformer,
            lenses,
            batches(),
            on_states=keep,
            on_logits=on_logits,
            progress=progress,
            total=total,
            phase=phase,
        )
    writer.finish()
    saturation = ranks.results()
    return SaturationData(
        transformer, lenses, saturation, walks.results(saturation), scores, target.open(), batches
    )


def numbers(mask: Tensor) -> Tensor:
    """The numbers of the rows that a mask selects."""
    return torch.nonzero(mask)[:, 0]
