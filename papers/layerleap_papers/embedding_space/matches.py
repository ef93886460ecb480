"""How many of a state's top tokens are found among those of the most active vectors: R_k.

In: what a pass over a text showed. Out: for every way to choose vectors and every block, the share
of top tokens found, one value per row; and the same with vectors that another document made active.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap import Transformer
from layerleap.models.weights import vectors
from layerleap.progress import Progress
from layerleap_papers.embedding_space.passes import WAYS, Active, Observed
from layerleap_papers.embedding_space.tokens import Order, found_among, others, top_ids

OWN, OTHERS = "own", "other documents"


@dataclass(frozen=True, eq=False)
class Matches:
    """R_k of every row: by way, block, state and source of the vectors.

    States: "raw", the layer's own; "last", that of the last; "linear", the layer's own carried
    to the last layer. Sources: the position itself, or one of another document.
    """

    documents: Tensor
    shares: dict[tuple[str, int, str, str], Tensor]  # (row,)

    @property
    def places(self) -> list[tuple[str, int]]:
        """The ways and blocks."""
        return list(dict.fromkeys(key[:2] for key in self.shares))

    def lead(self, way: str, block: int, state: str) -> Tensor:
        """What a position's own vectors find more than those of another document."""
        return self.shares[way, block, state, OWN] - self.shares[way, block, state, OTHERS]


@torch.no_grad()
def match(
    model: Transformer,
    matrix: Tensor,
    observed: Observed,
    k: int,
    *,
    generator: torch.Generator,
    progress: Progress,
) -> Matches:
    """Look the top tokens of states up among those of active vectors."""
    elsewhere = others(observed.documents, generator)
    shares: dict[tuple[str, int, str, str], Tensor] = {}
    kinds = list(dict.fromkeys((block, WAYS[way]) for way, block in observed.active))
    for number, (block, kind) in enumerate(kinds):
        progress("tokens of active parameters", number, len(kinds), "kinds in a layer")
        ways = [way for way, b in observed.active if (b, WAYS[way]) == (block, kind)]
        used = torch.cat([observed.active[way, block].rows.flatten() for way in ways]).unique()
        ends = top_ids(vectors(model, block, kind)[used], matrix, k, "high", "low")
        states = {"raw": observed.tops["raw"][:, block - 1], "last": observed.tops["raw"][:, -1]}
        if "linear" in observed.tops:
            states["linear"] = observed.tops["linear"][:, block - 1]
        for way in ways:
            active_tokens = _tokens(observed.active[way, block], used, ends)
            for state, state_tokens in states.items():
                shares[way, block, state, OWN] = found_among(state_tokens, active_tokens)
                shares[way, block, state, OTHERS] = found_among(
                    state_tokens, active_tokens[elsewhere]
                )
    return Matches(observed.documents, shares)


def _tokens(active: Active, used: Tensor, ends: dict[Order, Tensor]) -> Tensor:
    """The top tokens of every position's vectors, each taken with its sign: (row, active * k)."""
    place = torch.searchsorted(used, active.rows)
    tokens = torch.where(active.positive[..., None], ends["high"][place], ends["low"][place])
    return tokens.flatten(1)
