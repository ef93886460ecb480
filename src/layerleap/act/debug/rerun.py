"""A recorded prompt run again with edits, from the lowest edited block only.

In: a recorded pass and edits. Out: `Rerun`: the states of the edited run from that block on, and
which of them changed. States below the lowest edited block are those of the recording.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.models.hooks.edit import Edit, EditReport
from layerleap.models.hooks.recording import Recording
from layerleap.models.transformer import Transformer


@dataclass(frozen=True, eq=False)
class Rerun:
    """The edited run of one recorded pass."""

    lowest: int  # the lowest edited block
    states: dict[int, Tensor]  # by layer, from `lowest` on: (batch, pos, d_model)
    changed: Tensor  # (n_layers + 1, pos): True where a state is not the recorded one, bit for bit
    report: EditReport


def lowest_block(transformer: Transformer, edits: Sequence[Edit]) -> int:
    """The lowest block that the edits act in; raises if one does not fit the model."""
    if not edits:
        raise BadSettings("no edits given; expected at least one")
    return min(change.block for edit in edits for change in edit.changes(transformer))


@torch.no_grad()
def rerun(recording: Recording, edits: Sequence[Edit]) -> Rerun:
    """Run the blocks from the lowest edited one on, with the edits in force."""
    transformer = recording.transformer
    lowest = lowest_block(transformer, edits)
    h = recording.states[lowest - 1]
    states: dict[int, Tensor] = {}
    with transformer.edit(*edits) as report:
        for layer in range(lowest, transformer.n_layers + 1):
            h = states[layer] = recording.run(h, layer - 1, layer)
    changed = torch.zeros(transformer.n_layers + 1, h.shape[1], dtype=torch.bool)
    for layer, state in states.items():
        changed[layer] = (state != recording.states[layer]).any(-1).any(0).cpu()
    return Rerun(lowest, states, changed, report)
