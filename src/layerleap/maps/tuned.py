"""Tuned maps: shortcuts trained until what the head reads from them is close to the model's answer.

In: a bank to start from, rows to train on and rows held out. Out: a bank of plain linear maps, and
a record of KL and agreement on the held-out rows.

A tuned lens (arXiv 2303.08112) starts at the identity. Here it starts at the closed form, which
training would take thousands of rows to reach; the identity is there for comparison. All layers
are trained together, so that the model's own answer is computed once per batch.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadSettings, BadText
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap
from layerleap.maps.training import Training
from layerleap.maps.translator import (
    Measure,
    answers,
    kl_gradient,
    require_finite,
    translators,
)
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stats.saved_states import SavedStates
from layerleap.stats.tally import pause_after

ENTRIES = 2**23  # logits held at a time where readings are measured: 32 MB in float32


@dataclass(frozen=True)
class Tuning:
    """How maps are trained; plain values, written into the bank."""

    most_rows: int = 23_040  # rows a layer sees at most; the file is gone through again if need be
    rows_per_step: int = 256
    lr: float = 1e-3  # falls to 0 in a straight line; 3e-3 first makes things worse, 1e-2 diverges
    check_every: int = 15  # steps between two looks at the held-out rows
    patience: int = 3  # looks without an improvement after which a layer stops
    start: Literal["mat", "identity"] = "mat"
    seed: int = 0  # decides the order of the rows

    def __post_init__(self) -> None:
        for name in ("most_rows", "rows_per_step", "check_every", "patience"):
            if getattr(self, name) < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is too small; 1 or more is needed")
        if self.most_rows < self.rows_per_step:
            raise BadSettings(
                f"most_rows {self.most_rows} is less than one step of {self.rows_per_step} rows"
            )
        if not 0 < self.lr < float("inf"):
            raise BadSettings(f"lr {self.lr} is no step size; a number above 0 was wanted")
        if self.start not in ("mat", "identity"):
            raise BadSettings(f"start {self.start!r} is unknown; 'mat' or 'identity' was wanted")

    @property
    def steps(self) -> int:
        """Steps there are at most."""
        return self.most_rows // self.rows_per_step


@torch.no_grad()
def tune(
    transformer: Transformer,
    bank: ShortcutBank,
    rows: SavedStates,
    held_out: SavedStates,
    tuning: Tuning | None = None,
    *,
    layers: Sequence[int] | None = None,
    checkpoint: Path | None = None,
    progress: Progress = silent,
) -> tuple[ShortcutBank, list[dict[str, Any]]]:
    """The bank with its maps to the last layer trained, and the record of the training.

    A layer stops by itself when the held-out rows say so and keeps its best state; if nothing is
    better than its start map, that is kept. The record has a row per layer and look: layer, start,
    rows_seen, seconds (the layer's own steps and its share of the model's answers, looks not
    counted), kl, agreement, and best (is it the best state so far, so is it kept).

    Args:
        transformer: the model.
        bank: the closed-form maps; what is trained, and what training is compared with.
        rows: rows to train on.
        held_out: rows of other documents, which say when to stop; `SavedStates.split` makes both.
        tuning: how to train.
        layers: source layers to train; all by default.
        checkpoint: a file to save to about every half minute, and to go on from. It stays; call
            `recipes.finish` once the bank is safe.
        progress: told rows times layers.
    """
    tuning = tuning or Tuning()
    bank.check_model(transformer)
    for some, what in ((rows, "train on"), (held_out, "hold out")):
        if len(some) == 0:
            raise BadText(f"there are no rows to {what}; give more documents")
        some.check_model(transformer)
    run = _Run(transformer, bank, rows, held_out, tuning, _layers(bank, layers))
    run.go(checkpoint, progress)
    return run.bank(), run.training.record


def _layers(bank: ShortcutBank, wanted: Sequence[int] | None) -> list[int]:
    last = bank.n_layers
    found = [src for src in range(last) if (src, last) in bank.maps]
    chosen = found if wanted is None else sorted(set(wanted))
    if not chosen or not set(chosen) <= set(found):
        raise BadSettings(
            f"layers {chosen} to tune, but this bank has maps to the last layer from {found}"
        )
    return chosen


class _Run:
    """The training of all layers together, batch by batch."""

    def __init__(
        self,
        transformer: Transformer,
        bank: ShortcutBank,
        rows: SavedStates,
        held_out: SavedStates,
        tuning: Tuning,
        layers: list[int],
    ) -> None:
        self.transformer, self.tuning, self.origin = transformer, tuning, bank
        self.rows, self.held_out, self.layers = rows, held_out, layers
        self.device = transformer.device(transformer.n_layers)
        self.closed = [bank.maps[layer, bank.n_layers].to(self.device) for layer in layers]
        made = translators(self._starts(), rows)
        self.training = Training(dict(zip(layers, made, strict=True)))

    def go(self, checkpoint: Path | None, progress: Progress) -> None:
        """Train until every layer has stopped or seen its rows; go on from a checkpoint."""
        training, about = self.training, self._about()
        if checkpoint is not None and checkpoint.exists():
            training.resume(checkpoint, about)
        saved, pause = time.monotonic(), pause_after(0.0)
        while True:
            if training.checked < training.step and self._is_due():
                self._check()
            if training.step == self.tuning.steps or not training.active:
                break
            self._step()
            self._tell(progress)
            if checkpoint is not None and time.monotonic() - saved > pause:
                began = time.monotonic()
                training.save(checkpoint, about)
                saved = time.monotonic()
                pause = pause_after(saved - began)
        if checkpoint is not None:
            training.save(checkpoint, about)

    def _starts(self) -> list[LinearMap]:
        if self.tuning.start == "mat":
            return self.closed
        d = self.origin.d_model  # a matrix each: tensors that share memory cannot be saved
        return [
            LinearMap(m.src, m.dst, weight=torch.eye(d, device=self.device)) for m in self.closed
        ]

    def _about(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        digest = hashlib.sha256()
        for found in self.closed:
            for name, value in found.tensors().items():
                digest.update(f"{found.src} {name}".encode() + value.cpu().numpy().tobytes())
        return {
            "model": self.transformer.identity.fingerprint, "tuning": asdict(self.tuning),
            "layers": self.layers, "maps": digest.hexdigest(),
            "rows": self.rows.fingerprint(), "held_out": self.held_out.fingerprint(),
        }  # fmt: skip

    def _is_due(self) -> bool:
        step = self.training.step
        return step % self.tuning.check_every == 0 or step == self.tuning.steps

    def _check(self) -> None:
        """Look at the held-out rows, and let go of layers that have stopped improving."""
        training = self.training
        if training.step == 0 and self.tuning.start != "mat":  # what training is to be ahead of
            for layer, found in self._measure({m.src: m for m in self.closed}).items():
                training.note(layer, "mat", 0, *found, best=True)
        active = {layer: training.translators[layer] for layer in training.active}
        seen = training.step * self.tuning.rows_per_step
        for layer, (kl, agreement) in self._measure(active).items():
            if training.step == 0:
                require_finite(kl, layer)
            best = training.judge(layer, kl, self.tuning.patience)
            training.note(layer, self.tuning.start, seen, kl, agreement, best=best)
        training.checked = training.step

    def _measure(self, maps: dict[int, Any]) -> dict[int, tuple[float, float]]:
        measure = Measure(list(maps))
        size = max(1, ENTRIES // self.transformer.d_vocab)
        for start in range(0, len(self.held_out), size):
            states = self.held_out.states(slice(start, start + size)).to(self.device)
            carried = {layer: found(states[:, layer]) for layer, found in maps.items()}
            measure.add(self.transformer, states[:, -1], carried)
        return {layer: measure.of(layer) for layer in maps}

    def _step(self) -> None:
        """One batch: the model's answers once, then each layer's gradient and update."""
        training, tuning = self.training, self.tuning
        began = time.perf_counter()
        chosen = batch(len(self.rows), tuning.rows_per_step, training.step, tuning.seed)
        states = self.rows.states(chosen).to(self.device)
        p = answers(self.transformer, states[:, -1]).softmax(-1)
        shared = (time.perf_counter() - began) / len(training.active)
        lr = tuning.lr * (1 - training.step / tuning.steps)
        for layer in training.active:
            began = time.perf_counter()
            self._step_of(layer, states[:, layer], p, lr)
            spent = shared + time.perf_counter() - began
            training.seconds[layer] = training.seconds.get(layer, 0.0) + spent
        training.step += 1

    def _step_of(self, layer: int, x: Tensor, p: Tensor, lr: float) -> None:
        translator = self.training.translators[layer]
        white = translator.whitened(x)
        at_last = kl_gradient(self.transformer, translator(x, white), p).to(white.device)
        translator.update(translator.gradient(white, at_last), lr, self.training.step + 1)

    def _tell(self, progress: Progress) -> None:
        training, size = self.training, self.tuning.rows_per_step
        over, n = sum(training.stopped.values()), len(training.active)
        done, total = over + n * training.step, over + n * self.tuning.steps
        progress("tuning", done * size, total * size, "rows x layers")

    def bank(self) -> ShortcutBank:
        """The bank that came of it; what was said of maps that are no longer there is left out."""
        origin, last = self.origin, self.origin.n_layers
        kept = {layer for layer, t in self.training.translators.items() if not t.best.any()}
        same = kept if self.tuning.start == "mat" else set()
        tuned = {
            (layer, last): t.result().to("cpu")
            for layer, t in self.training.translators.items()
            if layer not in same
        }
        fits = [fit for pair, fit in origin.fits.items() if pair not in tuned]
        how = {
            **asdict(self.tuning), "layers": self.layers, "never improved": sorted(kept),
            "rows seen": [self._seen(layer) for layer in self.layers],
        }  # fmt: skip
        rows = {"rows_tuned_on": len(self.rows), "rows_tuning_held_out": len(self.held_out)}
        return origin.changed(
            maps=({**origin.maps, **tuned}).values(), fits=[*fits, *origin.part_fits.values()],
            settings={**origin.settings, "lens": "tuned", "tuning": how},
            data={**origin.data, **rows}, quality=self._quality(), source=f"{origin.source}, tuned",
        )  # fmt: skip

    def _seen(self, layer: int) -> int:
        steps = self.training.stopped.get(layer, self.training.step)
        return steps * self.tuning.rows_per_step

    def _quality(self) -> list[dict[str, Any]]:
        """Scores of the maps that were kept, on the rows that said when to stop."""
        n, start = len(self.held_out), self.tuning.start
        best = {
            row["layer"]: row
            for row in self.training.record
            if row["best"] and row["start"] == start
        }
        return [
            {"layer": k, "rows": n, "kl": row["kl"], "precision@1": row["agreement"]}
            for k, row in sorted(best.items())
        ]


def batch(n_rows: int, size: int, step: int, seed: int) -> Tensor:
    """Which rows step `step` (from 0) takes: every row once in random order, then all again."""
    numbers = np.arange(step * size, (step + 1) * size)
    rounds = numbers // n_rows
    found = []
    for which in np.unique(rounds).tolist():
        order = np.random.default_rng([seed, which]).permutation(n_rows)
        found.append(order[numbers[rounds == which] % n_rows])
    return torch.from_numpy(np.concatenate(found))
