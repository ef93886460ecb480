"""Made-up saturation layers, and states that contain them or not."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerleap.lens.lens import Lens
from layerleap.lens.probes.cells import task_labels
from layerleap.lens.probes.scores import RandomStates
from layerleap.lens.random_walks import RandomWalk, RandomWalks, Walk
from layerleap.lens.saturation import Saturation, SaturationObserver
from layerleap.lens.scores import score
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch


def saturation(
    rows: int = 200,
    n_layers: int = 12,
    k: int = 3,
    *,
    per_document: int = 4,
    seed: int = 0,
    in_order: bool = True,
) -> Saturation:
    """Random saturation layers; ranks saturate in order unless `in_order` is False."""
    g = torch.Generator().manual_seed(seed)
    layer = torch.randint(1, n_layers, (rows, k), generator=g)
    if in_order:
        layer = layer.sort(1).values
    tokens = torch.randint(50, (rows, k), generator=g).int()
    return Saturation(
        layer.to(torch.int16),
        tokens,
        torch.full((rows,), -1, dtype=torch.int32),
        torch.arange(rows) // per_document,
        torch.arange(rows) % per_document,
        n_layers,
        "logit",
    )


def ignorant(of: Saturation, d_model: int = 16, *, step: float = 0.1, seed: int = 0) -> Any:
    """Random walks: a row's states are similar, but hold nothing about its tasks."""
    steps = torch.tensor([1.0] + [step] * of.n_layers)
    return RandomStates(of.documents, d_model, steps, seed=seed)


class Knowing:
    """Random walks plus the task itself in a few coordinates."""

    def __init__(self, of: Saturation, d_model: int = 16, *, loudness: float = 1.0) -> None:
        self.walks, self.labels, self.loudness = ignorant(of, d_model), task_labels(of), loudness
        self.documents, self.d_model, self.n_layers = of.documents, d_model, of.n_layers
        self.model = self.walks.model

    def __len__(self) -> int:
        return len(self.walks)

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        states = self.walks.cells(rows, layers)
        task = self.labels[rows, layers].long()
        states[torch.arange(len(rows)), task] += self.loudness
        return states


def random_walk(logits: Iterable[Tensor], generator: torch.Generator) -> list[Tensor]:
    """A random walk beside some rows, layer by layer."""
    walk = Walk()
    return [walk.step(z, generator) for z in logits]


def walked(
    transformer: Transformer,
    lenses: Mapping[str, Lens],
    batches: Iterable[Batch],
    **settings: Any,
) -> tuple[dict[str, Saturation], dict[str, RandomWalk]]:
    """Saturation layers of a pass, and those of random walks beside it."""
    walks = RandomWalks(transformer, lenses, **settings)
    observer = SaturationObserver(transformer, lenses)

    def on_logits(name: str, layer: int, logits: Tensor) -> None:
        observer.on_logits(name, layer, logits)
        walks.on_logits(name, layer, logits)

    score(
        transformer,
        lenses,
        batches,
        on_states=lambda _, batch: observer.add_batch(batch),
        on_logits=on_logits,
    )
    saturation = observer.results()
    return saturation, walks.results(saturation)
