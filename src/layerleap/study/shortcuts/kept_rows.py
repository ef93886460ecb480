"""What is fitted to the rows that a pass has kept: no further pass over the text is needed.

In: a run and its rows. Out: a bank of fewer rows, for a fair comparison; maps trained to the
model's own answers, and the record of their training.
"""

import time
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from layerleap.errors import BadArtifact, WrongModel
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import solve
from layerleap.maps.tuned import Tuning
from layerleap.stats.moments import Moments
from layerleap.stats.saved_states import SavedStates
from layerleap.study.shortcuts.run import Run, named

HELD_OUT = 0.1  # of the documents fitted on: they say when training stops
IDENTITY_SHARE = 0.5  # of the training rows, spent on starting from the identity for comparison


def bank_of(
    rows: SavedStates, chosen: torch.Tensor, *, intercept: bool, ridge: float | str
) -> ShortcutBank:
    """Maps to the last layer, solved for rows that were kept.

    An automatic ridge, which needs rows held back, counts as none.
    """
    moments = Moments(rows.n_layers, rows.d_model, "final")
    for part in chosen.split(256):
        moments.add(list(rows.states(part).unbind(1)))
    penalty = 0.0 if ridge == "auto" else ridge
    solved = [
        next(iter(solve(moments, src, intercept=intercept, ridge=penalty)))
        for src in range(rows.n_layers)
    ]
    return ShortcutBank(
        [found for found, _ in solved], fits=[fit for _, fit in solved], model=rows.model,
        n_layers=rows.n_layers, d_model=rows.d_model,
        settings={"intercept": intercept, "ridge": penalty},
    )  # fmt: skip


def fit_sample(run: Run, rows: SavedStates, n_rows: int, label: str) -> ShortcutBank:
    """A bank to the last layer fitted on some of the rows that were kept: no pass is needed."""
    started, s = time.monotonic(), run.settings
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(s.sampling.seed))
    bank = bank_of(rows, chosen[:n_rows], intercept=s.intercept, ridge=s.ridge)
    documents = len(rows.documents[chosen[:n_rows]].unique())
    counts = {"documents": documents, "texts": n_rows, "rows": n_rows}
    account = run.account("fit", label, counts, n_rows, started)
    data = {"text": label, "study": [label, n_rows], "account": account, "fingerprint": label}
    return bank.changed(data={**counts, "rows_fitted": n_rows, **data})


def train(run: Run, rows: SavedStates) -> tuple[ShortcutBank, list[dict[str, Any]], dict[str, int]]:
    """Maps trained from the closed form, the record of that, and what it was judged by.

    Training also starts from the identity, on fewer rows, for comparison.

    The closed form that training starts from, and is compared with, is fitted on the rows
    trained on alone, so that the rows held out are new to both.
    """
    s = run.settings
    train, held = rows.split(HELD_OUT, s.sampling.seed)
    start = bank_of(train, torch.arange(len(train)), intercept=s.intercept, ridge=s.ridge)
    tuning = Tuning(max_rows=s.tuned_rows, seed=s.sampling.seed)
    tuning = replace(tuning, check_every=max(1, min(tuning.check_every, tuning.steps // 4)))
    record = []
    ways: tuple[tuple[Literal["identity", "mat"], float], ...]
    ways = (("identity", IDENTITY_SHARE), ("mat", 1.0))
    for way, share in ways:
        # Whole looks, so that both ways are judged after the same numbers of rows.
        looks = max(1, round(share * tuning.steps / tuning.check_every))
        most = min(s.tuned_rows, looks * tuning.check_every * tuning.rows_per_step)
        own_tuning = replace(tuning, start=way, max_rows=most)
        tuned, own = _trained(run, start, train, held, own_tuning)
        record += [row for row in own if row not in record]
    key = {"study": ["tuned", s.tuned_rows, s.sampling.seed], "fingerprint": "tuned"}
    judged = {"rows": len(held), "documents": len(held.documents.unique())}
    return tuned.changed(data={**tuned.data, **key}), record, judged


def _trained(
    run: Run,
    start: ShortcutBank,
    train: SavedStates,
    held: SavedStates,
    tuning: Tuning,
) -> tuple[ShortcutBank, list[dict[str, Any]]]:
    """One training; a checkpoint of another one is in nobody's way."""
    checkpoint = run.folder / f"tuning-{tuning.start}.safetensors"
    train_maps = partial(
        tune, run.transformer, start, train, held, tuning,
        checkpoint=checkpoint if run.work else None,
        progress=named(run.progress, f"training from {tuning.start}"),
    )  # fmt: skip
    try:
        return train_maps()
    except (BadArtifact, WrongModel):
        if not checkpoint.exists():
            raise
        checkpoint.unlink()
        return train_maps()
