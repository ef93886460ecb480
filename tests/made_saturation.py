"""Made-up saturation layers, and states that know of them or do not."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerleap.models.transformer import Transformer
from layerleap.read.lens import Lens
from layerleap.read.probes.cells import task_labels
from layerleap.read.probes.random_states import RandomStates
from layerleap.read.random_walks import Double, RandomWalk, RandomWalks
from layerleap.read.saturation import Ranks, Saturation
from layerleap.read.scores import score
from layerleap.stream.examples import Batch


def saturation(
    rows: int = 200, n_layers: int = 12, k: int = 3, *, per_document: int = 4, seed: int = 0,
    in_order: bool = True,
) -> Saturation:  # fmt: skip
    """Random saturation layers; ranks settle in order unless told otherwise."""
    g = torch.Generator().manual_seed(seed)
    layer = torch.randint(1, n_layers, (rows, k), generator=g)
    if in_order:
        layer = layer.sort(1).values
    tokens = torch.randint(50, (rows, k), generator=g).int()
    return Saturation(
        layer.to(torch.int16), tokens, torch.full((rows,), -1, dtype=torch.int32),
        torch.arange(rows) // per_document, torch.arange(rows) % per_document, n_layers, "id",
    )  # fmt: skip


def ignorant(of: Saturation, d_model: int = 16, *, step: float = 0.1, seed: int = 0) -> Any:
    """Random walks: a row's states are alike, and say nothing of its tasks."""
    steps = torch.tensor([1.0] + [step] * of.n_layers)
    return RandomStates(of.documents, d_model, steps, seed=seed)


class Knowing:
    """Random walks, and on top of them the task itself in a few coordinates."""

    def __init__(self, of: Saturation, d_model: int = 16, *, loudness: float = 1.0) -> None:
        self.walks, self.labels, self.loudness = ignorant(of, d_model), task_labels(of), loudness
        self.documents, self.d_model, self.n_layers = of.documents, d_model, of.n_layers
        self.model = self.walks.model

    def __len__(self) -> int:
        return len(self.walks)

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        found = self.walks.cells(rows, layers)
        task = self.labels[rows, layers].long()
        found[torch.arange(len(rows)), task] += self.loudness
        return found


def doubled(logits: Iterable[Tensor], generator: torch.Generator) -> list[Tensor]:
    """A random walk beside some rows, layer by layer."""
    double = Double()
    return [double.step(z, generator) for z in logits]


def walked(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    **settings: Any,
) -> tuple[dict[str, Saturation], dict[str, RandomWalk]]:
    """Saturation layers of a pass, and those of random walks beside it."""
    walks, ranks = RandomWalks(transformer, lenses, **settings), Ranks(transformer, lenses)

    def watch(way: str, layer: int, logits: Tensor) -> None:
        ranks.watch(way, layer, logits)
        walks.watch(way, layer, logits)

    score(transformer, lenses, batches, keep_states=lambda _, b: ranks.note(b), watch=watch)
    found = ranks.results()
    return found, walks.results(found)
