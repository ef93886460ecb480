"""States that know nothing: random walks through the layers, for a probe to fail on.

In: the states of a model, for their sizes. Out: `RandomStates` of as many rows, documents and
layers, which start anywhere and drift by steps as long as the model's own in random directions.

Neighbouring layers of a row are alike, as they are in a model, and nothing else is: a probe that
does better than chance on them has learned rows by heart, or the layer.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from layerleap.read.probes.task import States

SAMPLE = 256  # rows that sizes are measured on


class RandomStates:
    """A random walk for every row, made when it is asked for and always the same."""

    def __init__(
        self, documents: Tensor, d_model: int, steps: Tensor, *, seed: int = 0, name: str = "random"
    ) -> None:
        """Walks of given sizes.

        Args:
            documents: (row,) what counts as the document of each row.
            d_model: the width.
            steps: (n_layers + 1,) typical size of one coordinate of h[0], then of h[l] - h[l - 1].
            seed: of all walks.
            name: what the model behind them is called.
        """
        self.documents, self.d_model, self.steps, self.seed = documents, d_model, steps, seed
        self.n_layers = len(steps) - 1
        self.model: dict[str, Any] = {"name": name, "fingerprint": f"random states, seed {seed}"}

    @classmethod
    def like(cls, states: States, *, seed: int = 0) -> "RandomStates":
        """Walks for the rows of `states`, with steps as long as theirs."""
        rows = torch.linspace(0, len(states) - 1, min(SAMPLE, len(states))).round().long()
        every = [
            states.cells(rows, torch.full_like(rows, layer)) for layer in range(states.n_layers + 1)
        ]
        changes = [every[0], *(after - before for before, after in pairwise(every))]
        steps = torch.stack([change.double().square().mean().sqrt() for change in changes])
        name = f"random walks like {states.model.get('name')}"
        return cls(states.documents, states.d_model, steps, seed=seed, name=name)

    def __len__(self) -> int:
        return len(self.documents)

    def cells(self, rows: Tensor, layers: Tensor) -> Tensor:
        """h[layers[i]] of row rows[i]: (cell, d_model)."""
        found = torch.empty(len(rows), self.d_model)
        for row in rows.unique().tolist():
            here = rows == row
            found[here] = self._walk(row)[layers[here]]
        return found

    def _walk(self, row: int) -> Tensor:
        """(n_layers + 1, d_model)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + row)
        moves = torch.randn(self.n_layers + 1, self.d_model, generator=generator)
        return (moves * self.steps[:, None].float()).cumsum(0)
