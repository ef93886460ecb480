"""Scores of the model with parts of its blocks replaced by linear maps.

In: recorded passes over held-out text, and a bank with maps of parts.
Out: for each kind of part and each layer from which on it is replaced, the measures that lenses are
scored by, in the same tables.

Without its norms a model may overflow: gated FFNs multiply two mapped states, block after block.
Such rows count as wrong answers, and the metric "answered" is the share of the others.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerleap.act.edits.replace import PartMaps, cascades
from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.discovery.parts import check_kinds
from layerleap.models.hooks.recording import Recording
from layerleap.models.transformer import Transformer
from layerleap.read.reader import Predictor, Reader, StateRows, score_table
from layerleap.stream.examples import Batch


class PartScores:
    """Scores of replaced parts, batch after batch; kinds are replaced one at a time.

    It can share the passes that score lenses: `score(..., on_recording=scores.add)`.
    """

    def __init__(
        self,
        transformer: Transformer,
        bank: ShortcutBank,
        kinds: Collection[str] | None = None,
        starts: Collection[int] | None = None,
    ) -> None:
        """Start without any rows.

        Args:
            transformer: the model.
            bank: of that model, with maps of parts.
            kinds: of `models.parts.KINDS`; all that the bank has when None.
            starts: layers from which on to replace; all below the last when None. FFN and norms
                then cost about n_layers / 2 forward passes each.
        """
        self.transformer, self.maps = transformer, PartMaps(transformer, bank)
        self.kinds = self.maps.kinds if kinds is None else check_kinds(kinds)
        self.maps.require(self.kinds)
        _ = self.maps.is_local  # probed now, not between the passes that are scored
        self.starts = _check_starts(starts, transformer.n_layers)
        predictors = {kind: self._predictor(kind) for kind in self.kinds}
        self._reader = Reader(transformer, predictors, self.starts)
        self._documents: list[Tensor] = []

    def _predictor(self, kind: str) -> Predictor:
        return Predictor(
            f"the model with {kind} replaced", partial(self._state, kind), may_fail=True
        )

    @staticmethod
    def _state(kind: str, rows: StateRows, start: int) -> Tensor:
        return rows[kind, start]

    @torch.no_grad()
    def add(self, recording: Recording, batch: Batch) -> None:
        """Add one recorded batch: every kind, replaced from each of the layers on."""
        last = self.transformer.n_layers
        h = recording.states[last]
        rows: dict[Any, Tensor] = {last: h[batch.keep.to(h.device)]}
        for kind in self.kinds:
            ends = cascades(self.maps, recording, batch.keep, [kind], self.starts)
            rows |= {(kind, start): end for start, end in zip(self.starts, ends, strict=True)}
        self._reader.add(rows)
        self._documents.append(batch.documents)

    @property
    def has_rows(self) -> bool:
        """True once a batch was added."""
        return bool(self._documents)

    @torch.no_grad()
    def table(self, **labels: Any) -> list[dict[str, Any]]:
        """The table of `Scores.table`, with map = the kind and layer = where replacing starts.

        At the last layer nothing is left to replace, so that row is the full model. One more
        metric, "answered", is the share of rows with finite logits; surprisal and KL are None
        where it is below 1.
        """
        if not self._documents:
            raise BadText("no rows with parts replaced: add a recorded batch first")
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
    layers = tuple(sorted(set(range(n_layers) if starts is None else starts)))
    if not layers or layers[0] < 0 or layers[-1] >= n_layers:
        raise BadSettings(
            f"parts cannot be replaced from layers {list(layers)} on; expected layers in 0 to "
            f"{n_layers - 1}"
        )
    return layers
