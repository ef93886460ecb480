"""Maps made from rows that a fit has saved, without another pass over the text."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from layerleap import ShortcutBank, Transformer
from layerleap.errors import BadArtifact
from layerleap.maps import Tuning, solve, tune_maps
from layerleap.progress import Progress
from layerleap.stats import Moments, SavedStates
from layerleap.study import FitSettings, Row, named
from layerleap_papers.jump_to_conclusions.shortcut_settings import ShortcutSettings

STOPPING = 0.1  # share of the documents fitted on that decides when training stops
START_NAMES = {"linear": "mat", "logit": "identity"}  # in the words of the paper
IDENTITY_SHARE = 0.5  # of the training rows, for the comparison that starts from the identity


class Trained(NamedTuple):
    """Trained maps, how training went, and the rows that decided when it stopped.

    Those rows were not trained on, but they are not held out either: they chose the maps.
    """

    bank: ShortcutBank
    progress: list[Row]
    stopping: dict[str, int]  # number of rows, and of their documents


def bank_of(rows: SavedStates, chosen: torch.Tensor, settings: FitSettings) -> ShortcutBank:
    """Maps to the last layer, fitted on some saved rows.

    An automatic ridge, which needs rows held back, counts as none.
    """
    moments = Moments(rows.n_layers, rows.d_model, "final")
    for part in chosen.split(256):
        moments.add(list(rows.states(part).unbind(1)))
    options: dict[str, Any] = {
        "intercept": settings.intercept,
        "ridge": 0.0 if settings.ridge == "auto" else settings.ridge,
    }
    solved = [next(iter(solve(moments, src, **options))) for src in range(rows.n_layers)]
    return ShortcutBank(
        [shortcut for shortcut, _ in solved],
        fits=[fit for _, fit in solved],
        model=rows.model,
        n_layers=rows.n_layers,
        d_model=rows.d_model,
        settings=options,
    )


def _start(rows: SavedStates, settings: FitSettings, folder: Path) -> ShortcutBank:
    """The closed form, kept in `folder`.

    Another number of threads would round it differently, and a training is only resumed from the
    maps that it began with.
    """
    if folder.exists():
        with suppress(BadArtifact):  # damaged: fit it again
            return ShortcutBank.from_pretrained(folder)
    bank = bank_of(rows, torch.arange(len(rows)), settings)
    bank.save_pretrained(folder)
    return bank


def train(
    model: Transformer,
    rows: SavedStates,
    settings: ShortcutSettings,
    checkpoint: Path,
    progress: Progress,
) -> Trained:
    """Train maps from the closed form, and for comparison from the identity, on fewer rows.

    A tenth of the documents decides when training stops. The closed form that training starts from,
    and is compared with, is fitted on the other rows alone, so that these rows are new to both.
    Both trainings save their state beside `checkpoint`.
    """
    training, stopping = rows.split(STOPPING, settings.seed)
    start = _start(training, settings, checkpoint.with_name(f"{checkpoint.name}-start"))
    tuning = Tuning(max_rows=settings.tuned_rows, seed=settings.seed)
    tuning = replace(tuning, check_every=max(1, min(tuning.check_every, tuning.steps // 4)))
    record: list[Row] = []
    ways: dict[Literal["logit", "linear"], float] = {"logit": IDENTITY_SHARE, "linear": 1.0}
    for way, share in ways.items():
        # A whole number of checks, so that both are checked after the same numbers of rows.
        checks = max(1, round(share * tuning.steps / tuning.check_every))
        most = min(tuning.max_rows, checks * tuning.check_every * tuning.rows_per_step)
        bank, lines = tune_maps(
            model,
            start,
            training,
            stopping,
            replace(tuning, start=way, max_rows=most),
            checkpoint=checkpoint.with_name(f"{checkpoint.name}-{way}.safetensors"),
            progress=named(progress, f"training from {START_NAMES[way]}"),
        )
        record += [line for line in lines if line not in record]
    counts = {"rows": len(stopping), "documents": len(stopping.documents.unique())}
    return Trained(bank, record, counts)
