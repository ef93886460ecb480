"""Random walks through the layers: control states that contain no information.

In: the states of a model, for their sizes. Out: `RandomStates` with the same rows, documents and
layers. They start at random and take steps as long as the model's in random directions.

Neighbouring layers of a row are similar, as in a model, and nothing else is. A probe that beats
chance on them has memorised rows, or recognises the layer.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from layerleap.lens.probes.task import States

SAMPLE = 256  # rows used to measure sizes


class RandomStates:
    """A random walk for every row, generated on demand and always the same."""

    def __init__(
        self, documents: Tensor, d_model: int, steps: Tensor, *, seed: int = 0, name: str = "random"
    ) -> None:
        """Walks of given sizes.

        Args:
            documents: (row,) the document of each row.
            steps: (n_layers + 1,) typical size of a coordinate of h[0], then of h[l] - h[l - 1].
        """
        self.documents, self.d_model, self.steps, self.seed = documents, d_model, steps, seed
        self.n_layers = len(steps) - 1
        self.model: dict[str, Any] = {"name": name, "fingerprint": f"random states, seed {seed}"}

    @classmethod
    def like(cls, states: States, *, seed: int = 0) -> "RandomStates":
        """Walks for the rows of `states`, with steps as long as theirs."""
        rows = torch.linspace(0, len(states) - 1, min(SAMPLE, len(states))).round().long()
        layers = [
            states.cells(rows, torch.full_like(rows, layer)) for layer in range(states.n_layers + 1)
        ]
        changes = [layers[0], *(after - before for before, after in pairwise(layers))]
        steps = torch.stack([change.double().square().mean().sqrt() for change in changes])
        name = f"random walks like {states.model.get('name')}"
        return cls(states.documents, states.d_model, steps, seed=seed, name=name)

    def __len__(self) -> int:
        return len(self.documents)

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        """h[layers[i]] of row rows[i]: (cell, d_model)."""
        states = torch.empty(len(rows), self.d_model)
        for row in rows.unique().tolist():
            here = rows == row
            states[here] = self._walk(row)[layers[here]]
        return states

    def _walk(self, row: int) -> Tensor:
        """The walk of one row: (n_layers + 1, d_model)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + row)
        moves = torch.randn(self.n_layers + 1, self.d_model, generator=generator)
        return (moves * self.steps[:, None].float()).cumsum(0)
