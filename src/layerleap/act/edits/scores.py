"""Scores of the model when parts of its blocks, or whole blocks, become linear maps.

In: recorded passes over held-out text, and a bank with maps of parts or between all layers.
Out: the measures that lenses are scored by, in the same tables: `PartScores` for each kind of part
and each layer from which on it is replaced, `ScheduleScores` for each schedule.

Without its norms a model may overflow: gated FFNs multiply two mapped states, block after block.
Such rows count as wrong answers, and the metric "answered" is the share of the others.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerleap.act.edits.replace import PartMaps, cascades
from layerleap.act.edits.schedule import Schedule
from layerleap.errors import BadSettings, BadText
from layerleap.lens.reader import Predictor, Reader, StateRows, score_table
from layerleap.maps.bank import ShortcutBank
from layerleap.models.discovery.parts import check_kinds
from layerleap.models.hooks.recording import Recording
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch


class _EndScores:
    """Scores of the last states that changed models end with, batch after batch.

    It can share the passes that score lenses: `score(..., on_recording=scores.add)`.
    """

    def __init__(
        self, transformer: Transformer, names: Iterable[str], numbers: Sequence[int]
    ) -> None:
        """Start without any rows; every name has one end for each number."""
        predictors = {
            name: Predictor(f"the model with {name} replaced", partial(_end, name), may_fail=True)
            for name in names
        }
        self.transformer = transformer
        self._reader = Reader(transformer, predictors, numbers)
        self._documents: list[Tensor] = []

    @abstractmethod
    def _ends(self, recording: Recording, keep: Tensor) -> dict[tuple[str, int], Tensor]:
        """h[n_layers] at the kept positions, by name and number."""

    @torch.no_grad()
    def add(self, recording: Recording, batch: Batch) -> None:
        """Add one recorded batch."""
        last = self.transformer.n_layers
        rows = self.transformer.rows(recording.states[last], batch.keep)
        self._reader.add({last: rows, **self._ends(recording, batch.keep)})
        self._documents.append(batch.documents)

    @property
    def has_rows(self) -> bool:
        """True once a batch was added."""
        return bool(self._documents)

    def _columns(self) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
        if not self._documents:
            raise BadText("no rows were scored: add a recorded batch first")
        with torch.no_grad():
            return torch.cat(self._documents), self._reader.columns()


def _end(name: str, rows: StateRows, number: int) -> Tensor:
    return rows[name, number]


class PartScores(_EndScores):
    """Scores of replaced parts; kinds are replaced one at a time."""

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
        self.maps = PartMaps(transformer, bank)
        self.kinds = self.maps.kinds if kinds is None else check_kinds(kinds)
        self.maps.require(self.kinds)
        _ = self.maps.is_local  # probed now, not between the passes that are scored
        n_layers = transformer.n_layers
        self.starts = tuple(sorted(set(range(n_layers) if starts is None else starts)))
        if not self.starts or self.starts[0] < 0 or self.starts[-1] >= n_layers:
            raise BadSettings(
                f"parts cannot be replaced from layers {list(self.starts)} on; expected layers in "
                f"0 to {n_layers - 1}"
            )
        super().__init__(transformer, self.kinds, self.starts)

    def _ends(self, recording: Recording, keep: Tensor) -> dict[tuple[str, int], Tensor]:
        return {
            (kind, start): end
            for kind in self.kinds
            for start, end in zip(
                self.starts, cascades(self.maps, recording, keep, [kind], self.starts), strict=True
            )
        }

    def table(self, **labels: Any) -> list[dict[str, Any]]:
        """The table of `Scores.table`, with map = the kind and layer = where replacing starts.

        At the last layer nothing is left to replace, so that row is the full model. One more
        metric, "answered", is the share of rows with finite logits; surprisal and KL are None
        where it is below 1.
        """
        layers = (*self.starts, self.transformer.n_layers)
        return score_table(*self._columns(), labels, layers, answered=True)

    def agreement(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Documents of rows, and by kind whether the top token is the model's own: (row, start).

        The last column is the model itself.
        """
        documents, columns = self._columns()
        return documents, {kind: rank == 0 for kind, rank in columns["rank"].items()}


class ScheduleScores(_EndScores):
    """Scores of schedules."""

    def __init__(
        self, transformer: Transformer, bank: ShortcutBank, schedules: Mapping[str, list[Schedule]]
    ) -> None:
        """Start without any rows.

        Args:
            transformer: the model.
            bank: of that model, with the maps of all jumps.
            schedules: by kind, which becomes a column of the table.
        """
        bank.check_model(transformer)
        self.bank = bank.to(transformer.device)
        self.kind = {s: kind for kind, group in schedules.items() for s in group}
        self.schedules = list(self.kind)
        for schedule in self.schedules:
            if schedule.n_layers != transformer.n_layers:
                raise BadSettings(
                    f"schedule {schedule} leads to layer {schedule.n_layers}; this model has "
                    f"{transformer.n_layers} layers"
                )
            for pair in schedule.jumps:
                _ = bank[pair]  # raises for a missing map, before a pass is spent
        super().__init__(transformer, ["schedule"], range(len(self.schedules)))

    def _ends(self, recording: Recording, keep: Tensor) -> dict[tuple[str, int], Tensor]:
        return {
            ("schedule", n): run_schedule(schedule, recording, self.bank, keep)
            for n, schedule in enumerate(self.schedules)
        }

    def table(self) -> list[dict[str, Any]]:
        """One row per schedule and metric; `blocks` is its cost."""
        rows = []
        for row in score_table(*self._columns(), {}):
            if row["layer"] == len(self.schedules):
                continue  # the full model, which runs every block
            schedule = self.schedules[row["layer"]]
            labels = {
                "schedule": str(schedule),
                "name": schedule.name,
                "kind": self.kind[schedule],
                "blocks": schedule.blocks,
            }
            rows.append(labels | {k: v for k, v in row.items() if k not in ("map", "layer")})
        return rows

    def agreement(self) -> tuple[Tensor, Tensor]:
        """Documents of rows, and whether the top token is the model's own: (row, schedule)."""
        documents, columns = self._columns()
        return documents, columns["rank"]["schedule"][:, : len(self.schedules)] == 0


def run_schedule(
    schedule: Schedule, recording: Recording, bank: ShortcutBank, keep: Tensor
) -> Tensor:
    """h[n_layers] at the kept positions, when the recorded text runs along `schedule`.

    Jumps are taken at all positions, because the blocks after them attend to all; after the last
    block only the kept positions go on. States before the first jump are the recorded ones.

    Args:
        schedule: for the recorded model.
        recording: an unedited pass.
        bank: with the maps of all jumps.
        keep: boolean (batch, pos), in row-major order.
    """
    h, has_jumped, rows = recording.states[0], False, recording.transformer.rows
    last_run = max((s.dst for s in schedule.segments if s.kind == "run"), default=0)
    for segment in schedule.segments:
        if segment.src == last_run:
            h = rows(h, keep)
        if segment.kind == "jump":
            h, has_jumped = bank[segment.src, segment.dst](h), True
        elif has_jumped:
            h = recording.run(h, segment.src, segment.dst)
        else:
            h = recording.states[segment.dst]
    return rows(h, keep) if schedule.segments[-1].kind == "run" else h
