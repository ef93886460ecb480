"""Where early exit would stop at a position, and whether it would give the model's answer there.

In: the cells of one position. Out: a `Stop`, or None. A rule looks at one layer only, so it can be
sure of a token that later layers replace: then the stop is a warning and not an offer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from layerleap.act.debug.cells import Cell
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.rules import TopProbability
from layerleap.lens.vocabulary.tokens import output_label
from layerleap.models.transformer import Transformer

EXIT = TopProbability(0.9)  # shown as an example of early exit


@dataclass(frozen=True)
class Stop:
    """The layer where `EXIT` stops, and both tokens by id."""

    layer: int
    top: int  # what would be answered there
    answer: int  # what the whole model answers, with the edits of this run

    @property
    def agrees(self) -> bool:
        """Whether exiting here gives the model's answer."""
        return self.top == self.answer

    def to_dict(self, transformer: Transformer) -> dict[str, Any]:
        """Plain JSON types, with the tokens as they are shown."""
        return {
            "layer": self.layer,
            "agrees": self.agrees,
            "top": output_label(transformer, self.top).to_dict(),
            "answer": output_label(transformer, self.answer).to_dict(),
        }


def first_stop(cells: Mapping[int, Cell], n_layers: int, answer: int) -> Stop | None:
    """The layer below the last at which `EXIT` stops; None if it never does.

    Args:
        cells: of one position, by layer.
        n_layers: the last layer, which is no exit.
        answer: the model's top token at this position.
    """
    layers = range(n_layers)
    if not all(math.isfinite(cells[layer].entropy) for layer in layers):
        return None
    top, prob, entropy = torch.tensor(
        [(*cells[layer].top[0], cells[layer].entropy) for layer in layers]
    ).T[:, None]
    unknown = torch.full_like(prob, torch.nan)
    row = torch.zeros(1, dtype=torch.long)
    evidence = Evidence(top.long(), prob, unknown, entropy, unknown, row, row, tuple(layers))
    stops = EXIT.stops(evidence)[0].nonzero()[:, 0]
    if not len(stops):
        return None
    layer = int(stops[0])
    return Stop(layer, cells[layer].top[0][0], answer)
