"""What else is made of a recorded pass: parts of blocks replaced, blocks and jumps in turn.

In: a model, its banks and how many texts to spend. Out: the tables of both, from the same forward
pass that lenses are scored in.

Batches are sorted by length, and short texts are many to a batch. So where only some texts are
wanted, each is drawn by itself, with the same chance, and those drawn are recorded once more.
"""

from collections.abc import Mapping
from typing import Any

import torch

from layerleap.act.edits.part_scores import PartScores
from layerleap.act.edits.schedule import best_schedules, round_robins, single_jump
from layerleap.act.edits.schedule_scores import ScheduleScores
from layerleap.errors import ModelRefused
from layerleap.maps.bank import ShortcutBank
from layerleap.models.discovery.parts import KINDS, replaceable
from layerleap.models.hooks.recording import Recording, record
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch

BIASED_STARTS = 4  # layers from which on parts with an intercept are tried: enough to compare


def kinds_of(transformer: Transformer) -> tuple[tuple[str, ...], str | None]:
    """The kinds of parts that a map could stand in for, and why not the others."""
    kinds, reasons = [], []
    for kind in KINDS:
        try:
            replaceable(transformer, [kind])
            kinds.append(kind)
        except ModelRefused as error:
            reasons.append(str(error))
    return tuple(kinds), "; ".join(dict.fromkeys(reasons)) or None


class Inside:
    """Rides on the pass that scores lenses: `score(..., on_recording=inside.add)`."""

    def __init__(
        self,
        transformer: Transformer,
        bank: ShortcutBank,
        biased: ShortcutBank | None,
        *,
        read_texts: int,
        part_texts: int,
        schedule_texts: int,
    ) -> None:
        """Nothing seen yet.

        Args:
            transformer: the model.
            bank: with maps of parts, of all pairs of layers, or of both.
            biased: the same parts fitted with an intercept.
            read_texts: how many texts the pass will read.
            part_texts: for how many of them parts are replaced; 0 for none.
            schedule_texts: for how many schedules are run; 0 for none.
        """
        self.parts: list[tuple[bool, PartScores]] = []
        last = transformer.n_layers
        if part_texts and bank.parts:
            self.parts.append((False, PartScores(transformer, bank)))
            if biased is not None:
                starts = sorted({round(n * last / BIASED_STARTS) for n in range(BIASED_STARTS)})
                self.parts.append((True, PartScores(transformer, biased, starts=starts)))
        self.schedules = None
        if schedule_texts and not bank.is_final_only:
            self.schedules = ScheduleScores(transformer, bank, _schedules(bank))
        self.transformer = transformer
        self._shares = [min(1.0, n / read_texts) for n in (part_texts, schedule_texts)]

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do, so that passes need not be recorded."""
        return not self.parts and self.schedules is None

    def add(self, recording: Recording, batch: Batch) -> None:
        """Take in one recorded batch, or the texts of it that are drawn."""
        takers: list[list[PartScores | ScheduleScores]] = [
            [scores for _, scores in self.parts],
            [] if self.schedules is None else [self.schedules],
        ]
        for share, group in zip(self._shares, takers, strict=True):
            some = self._drawn(recording, batch, share) if group else None
            if some is not None:
                for scores in group:
                    scores.add(*some)

    def _drawn(
        self, recording: Recording, batch: Batch, share: float
    ) -> tuple[Recording, Batch] | None:
        if share >= 1:
            return recording, batch
        draw = torch.Generator().manual_seed(batch.index)
        chosen = torch.rand(batch.n_texts, generator=draw) < share
        if not chosen.any():
            return None
        some = batch.texts(chosen)
        return record(self.transformer, some.inputs), some

    def tables(self) -> dict[str, Any]:
        """`parts` (rows, or None) and `schedules` (rows, or None)."""
        parts = [
            row for bias, scores in self.parts if scores.has_rows for row in scores.table(bias=bias)
        ]
        has_rows = self.schedules is not None and self.schedules.has_rows
        return {
            "parts": parts or None,
            "schedules": self.schedules.table() if self.schedules and has_rows else None,
        }


def _schedules(bank: ShortcutBank) -> Mapping[str, list[Any]]:
    """Round-robins, and for each of their costs the best schedule and the single jump.

    R2 is that of the rows fitted on: what is read must not choose how it is read.
    """
    last, turns = bank.n_layers, round_robins(bank.n_layers)
    budgets = sorted({schedule.blocks for schedule in turns}) or list(range(1, last))
    r2 = {pair: fit.train_r2 for pair, fit in bank.fits.items()}
    return {
        "single jump": [single_jump(last, blocks) for blocks in budgets],
        "round robin": turns,
        "best R2": best_schedules(r2, last, budgets),
    }
