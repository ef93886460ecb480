"""How good the model's answers still are when parts of its blocks are replaced by maps.

In: recorded passes over a text that was not fitted on, and a bank with maps of parts.
Out: for each kind of part and each layer from which on it is replaced, the measures that lenses are
scored by, in the same tables.

Without its norms a model may run out of numbers: gated FFNs multiply two mapped states, block after
block. Such rows count as wrong answers, and the metric "answered" says how many are none.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerleap.act.edits.replace import Replacement, cascades
from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.discovery.parts import check_kinds
from layerleap.models.hooks.recording import Recording
from layerleap.models.transformer import Transformer
from layerleap.read.reader import Predictor, Reader, Rows, score_table
from layerleap.stream.examples import Batch


class PartScores:
    """Scores of replaced parts, batch after batch; each kind is replaced by itself.

    It can ride on the pass that scores lenses: `score(..., also=scores.add)`.
    """

    def __init__(
        self,
        transformer: Transformer,
        bank: ShortcutBank,
        kinds: Collection[str] | None = None,
        starts: Collection[int] | None = None,
    ) -> None:
        """Nothing seen yet.

        Args:
            transformer: the model.
            bank: of that model, with maps of parts.
            kinds: of `models.parts.KINDS`; all that the bank has when None.
            starts: layers from which on to replace; all below the last when None. From every
                layer on, FFN and norms cost about n_layers / 2 forward passes each.
        """
        self.transformer, self.replacement = transformer, Replacement(transformer, bank)
        self.kinds = self.replacement.kinds if kinds is None else check_kinds(kinds)
        self.replacement.require(self.kinds)
        self.starts = _check_starts(starts, transformer.n_layers)
        ways = {kind: self._way(kind) for kind in self.kinds}
        self._reader = Reader(transformer, ways, self.starts)
        self._documents: list[Tensor] = []

    def _way(self, kind: str) -> Predictor:
        return Predictor(
            f"the model with {kind} replaced", partial(self._state, kind), may_fail=True
        )

    @staticmethod
    def _state(kind: str, rows: Rows, start: int) -> Tensor:
        return rows[kind, start]

    @torch.no_grad()
    def add(self, recording: Recording, batch: Batch) -> None:
        """Take in one recorded batch: every kind, replaced from every layer on."""
        last = self.transformer.n_layers
        h = recording.states[last]
        rows: dict[Any, Tensor] = {last: h[batch.keep.to(h.device)]}
        for kind in self.kinds:
            ends = cascades(self.replacement, recording, batch.keep, [kind], self.starts)
            rows |= {(kind, start): end for start, end in zip(self.starts, ends, strict=True)}
        self._reader.add(rows)
        self._documents.append(batch.documents)

    @property
    def has_rows(self) -> bool:
        """True once a batch was taken in."""
        return bool(self._documents)

    @torch.no_grad()
    def table(self, **labels: Any) -> list[dict[str, Any]]:
        """As `Scores.table`, with map = the kind and layer = where replacing began.

        At the last layer nothing is left to replace, and the row is the model itself. One more
        metric, "answered", is the share of rows whose answer is made of numbers; surprisal and
        KL are None where it is below 1.
        """
        if not self._documents:
            raise BadText("no position was read with parts replaced: add a recorded batch first")
        layers = (*self.starts, self.transformer.n_layers)
        return score_table(
            torch.cat(self._documents), self._reader.columns(), labels, layers, answered=True
        )

    @torch.no_grad()
    def agreement(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Documents of rows, and by kind whether the top token is the model's own: (row, start).

        The last column is the model itself.
        """
        ranks = self._reader.columns()["rank"]
        return torch.cat(self._documents), {kind: rank == 0 for kind, rank in ranks.items()}


def _check_starts(starts: Collection[int] | None, n_layers: int) -> tuple[int, ...]:
    found = tuple(sorted(set(range(n_layers) if starts is None else starts)))
    if not found or found[0] < 0 or found[-1] >= n_layers:
        raise BadSettings(
            f"parts cannot be replaced from layers {list(found)} on; of 0 to {n_layers - 1} were "
            "wanted"
        )
    return found
