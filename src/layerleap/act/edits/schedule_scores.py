"""Scores of the model when blocks and jumps take turns.

In: recorded passes over held-out text, a bank with maps between all layers, and schedules.
Out: for each schedule the measures that lenses are scored by.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerleap.act.edits.schedule import Schedule
from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.models.hooks.recording import Recording
from layerleap.models.transformer import Transformer
from layerleap.read.reader import Predictor, Reader, StateRows, score_table
from layerleap.stream.examples import Batch


def run_schedule(
    schedule: Schedule, recording: Recording, bank: ShortcutBank, keep: Tensor
) -> Tensor:
    """h[n_layers] at the kept positions, when the recorded text runs along `schedule`.

    Jumps are taken at all positions, because the blocks after them attend to all; after the last
    block only the kept positions go on.

    Args:
        schedule: for the recorded model.
        recording: an unedited pass; states before the first jump are taken from it.
        bank: with the maps of all jumps.
        keep: boolean (batch, pos), in row-major order.
    """
    h, has_jumped = recording.states[0], False
    last_run = max((s.dst for s in schedule.segments if s.kind == "run"), default=0)
    for segment in schedule.segments:
        if segment.src == last_run:
            h = h[keep.to(h.device)]
        if segment.kind == "jump":
            h, has_jumped = bank[segment.src, segment.dst](h), True
        elif has_jumped:
            h = recording.run(h, segment.src, segment.dst)
        else:
            h = recording.states[segment.dst]
    return h[keep.to(h.device)] if schedule.segments[-1].kind == "run" else h


def _state(rows: StateRows, number: int) -> Tensor:
    return rows["schedule", number]


class ScheduleScores:
    """Scores of schedules, batch after batch."""

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
        self.transformer, self.bank = transformer, bank.to(transformer.device)
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
        predictor = Predictor("the model with jumps", _state, may_fail=True)
        self._reader = Reader(transformer, {"schedule": predictor}, range(len(self.schedules)))
        self._documents: list[Tensor] = []

    @torch.no_grad()
    def add(self, recording: Recording, batch: Batch) -> None:
        """Add one recorded batch."""
        h = recording.states[self.transformer.n_layers]
        rows: dict[Any, Tensor] = {self.transformer.n_layers: h[batch.keep.to(h.device)]}
        for number, schedule in enumerate(self.schedules):
            rows["schedule", number] = run_schedule(schedule, recording, self.bank, batch.keep)
        self._reader.add(rows)
        self._documents.append(batch.documents)

    @property
    def has_rows(self) -> bool:
        """True once a batch was added."""
        return bool(self._documents)

    @torch.no_grad()
    def table(self) -> list[dict[str, Any]]:
        """One row per schedule and metric; `blocks` is its cost."""
        if not self._documents:
            raise BadText("no rows of any schedule: add a recorded batch first")
        table = score_table(torch.cat(self._documents), self._reader.columns(), {})
        rows = []
        for row in table:
            if row["layer"] == len(self.schedules):
                continue  # the full model, which runs every block
            schedule = self.schedules[row["layer"]]
            labels = {
                "schedule": str(schedule), "name": schedule.name, "kind": self.kind[schedule],
                "blocks": schedule.blocks,
            }  # fmt: skip
            rows.append(labels | {k: v for k, v in row.items() if k not in ("map", "layer")})
        return rows

    @torch.no_grad()
    def agreement(self) -> tuple[Tensor, Tensor]:
        """Documents of rows, and whether the top token is the model's own: (row, schedule)."""
        rank = self._reader.columns()["rank"]["schedule"]
        return torch.cat(self._documents), rank[:, : len(self.schedules)] == 0
