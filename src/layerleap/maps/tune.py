"""Fine-tune the maps of a bank until their readings match the model's output: `ll.tune`.

In: a model, a closed-form bank and a text. Out: `Tuned`, a bank of plain linear maps and the record
of its training: KL and agreement on held-out documents.

One pass saves a sample of states; the maps are then trained on them until held-out documents show
no more improvement. A tuned lens (arXiv 2303.08112) starts at the identity. Here it starts at the
closed form, which training would need thousands of rows to reach; the identity is available for
comparison. All layers train together, so the model's output is computed once per batch. A
checkpoint holds everything a resumed run needs to end with bit-identical maps.
"""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, NotFinite
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import with_scores
from layerleap.maps.linear import TunedMap
from layerleap.maps.map import Map
from layerleap.maps.map_settings import Tuning
from layerleap.maps.translator import (
    Answers,
    Translator,
    affine_of,
    kl_gradient,
    logits_of,
    translators,
)
from layerleap.memory import rows_at_once
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting, silent
from layerleap.results.base import Result
from layerleap.results.columns import Column, Row, Table
from layerleap.short_repr import ShortRepr
from layerleap.stats.collect import collect
from layerleap.stats.fit_statistics import Saver
from layerleap.stats.saved_states import SavedStates, StateFile
from layerleap.stats.tensor_file import TensorFile, require_same_run
from layerleap.stream.examples import Sampling

CHECKPOINT = TensorFile("tuning", 3)
COUNTERS = ("seconds", "best", "misses", "stopped")  # by layer


@torch.no_grad()
def tune_maps(
    transformer: Transformer,
    bank: ShortcutBank,
    states: SavedStates,
    held_out: SavedStates,
    tuning: Tuning | None = None,
    *,
    layers: Sequence[int] | None = None,
    checkpoint: Path | None = None,
    progress: Progress = silent,
) -> tuple[ShortcutBank, list[dict[str, Any]]]:
    """The bank with its maps to the last layer fine-tuned, and the record of the training.

    A layer stops when the held-out states show no more improvement, and keeps its best map; that
    is the start map if nothing was better. The record has a row per layer and check: layer, start,
    rows_seen, seconds (the layer's own steps and its share of the model's output, without checks),
    kl, agreement, and best (True if the map was the best so far).

    Args:
        bank: the closed-form maps to train, and to compare with.
        states: states to train on, from `collect(..., save_states=...)`.
        held_out: states of other documents, which decide when to stop; `SavedStates.split` gives
            both.
        layers: source layers to train; all by default.
        checkpoint: a file to save to about every half minute, and to resume from. It stays; call
            `layerleap.stats.finish` once the bank is saved.
    """
    tuning = tuning or Tuning()
    bank.check_model(transformer)
    for side, purpose in ((states, "train on"), (held_out, "hold out")):
        if len(side) == 0:
            raise BadText(f"there are no rows to {purpose}; give more documents")
        side.check_model(transformer)
    run = _Run(transformer, bank, states, held_out, tuning, _layers(bank, layers))
    run.train(checkpoint, progress)
    return run.bank(), run.training.record


def check_starts(bank: ShortcutBank, layers: Sequence[int] | None = None) -> None:
    """Raise `BadSettings` if training cannot start at the maps of these layers."""
    for layer in _layers(bank, layers):
        affine_of(bank.maps[layer, bank.n_layers], bank.d_model)


def _layers(bank: ShortcutBank, layers: Sequence[int] | None) -> list[int]:
    last = bank.n_layers
    available = [src for src in range(last) if (src, last) in bank.maps]
    chosen = available if layers is None else sorted(set(layers))
    if not chosen or not set(chosen) <= set(available):
        raise BadSettings(
            f"cannot tune layers {chosen}: this bank has maps to the last layer from {available}"
        )
    return chosen


@dataclass
class Training:
    """The translators of all layers, and how far they have come: the state in a checkpoint."""

    translators: dict[int, Translator]
    step: int = 0
    checked: int = -1  # the step of the last check
    seconds: dict[int, float] = field(default_factory=dict)  # spent on each layer
    best: dict[int, float] = field(default_factory=dict)  # the lowest KL
    misses: dict[int, int] = field(default_factory=dict)  # checks since then
    stopped: dict[int, int] = field(default_factory=dict)  # the step at which a layer stopped
    record: list[dict[str, Any]] = field(default_factory=list)

    @property
    def active(self) -> list[int]:
        """The layers that still train."""
        return [layer for layer in self.translators if layer not in self.stopped]

    def is_best(self, layer: int, kl: float, patience: int) -> bool:
        """True if this is the layer's lowest KL; a layer that keeps missing it is stopped."""
        if kl < self.best.get(layer, math.inf):
            self.best[layer], self.misses[layer] = kl, 0
            self.translators[layer].keep_best()
            return True
        self.misses[layer] += 1
        if self.misses[layer] >= patience or not math.isfinite(kl):
            self.stopped[layer] = self.step
        return False

    def add_check(
        self, layer: int, start: str, rows_seen: int, kl: float, agreement: float, *, best: bool
    ) -> None:
        """Add one check to the record; a KL that is not finite becomes None."""
        row = {"layer": layer, "start": start, "rows_seen": rows_seen}
        row |= {"seconds": self.seconds.get(layer, 0.0), "kl": kl if math.isfinite(kl) else None}
        self.record.append({**row, "agreement": agreement, "best": best})

    def save(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write everything; a resumed run must have the same `about`."""
        tensors = {
            f"{layer}.{name}": value
            for layer, translator in self.translators.items()
            for name, value in translator.state().items()
        }
        numbers = {name: getattr(self, name) for name in ("step", "checked", "record", *COUNTERS)}
        CHECKPOINT.save(path, tensors, {"about": about, **numbers})

    def resume(self, path: Path, about: Mapping[str, Any]) -> None:
        """Load what `save` wrote; a file of another run is refused."""
        tensors, header = CHECKPOINT.load(path)
        require_same_run(path, header["about"], about)
        self.step, self.checked, self.record = (header[k] for k in ("step", "checked", "record"))
        for name in COUNTERS:  # JSON has no integer keys
            setattr(self, name, {int(layer): value for layer, value in header[name].items()})
        for layer, translator in self.translators.items():
            translator.restore({n: tensors[f"{layer}.{n}"] for n in translator.state()})


@dataclass
class _Run:
    """The training of all layers together, batch by batch."""

    transformer: Transformer
    origin: ShortcutBank
    states: SavedStates
    held_out: SavedStates
    tuning: Tuning
    layers: list[int]

    def __post_init__(self) -> None:
        self.device = self.transformer.device(self.transformer.n_layers)
        pairs = [(layer, self.origin.n_layers) for layer in self.layers]
        self.closed = [self.origin.maps[pair].to(self.device) for pair in pairs]
        starts = translators(self._starts(), self.states)
        self.training = Training(dict(zip(self.layers, starts, strict=True)))

    def train(self, checkpoint: Path | None, progress: Progress) -> None:
        """Train until every layer has stopped or seen its rows; resume from a checkpoint."""
        training, about = self.training, self._about()
        if checkpoint is not None and checkpoint.exists():
            training.resume(checkpoint, about)
        saver = Saver(lambda path: training.save(path, about), checkpoint)
        while True:
            is_last = training.step == self.tuning.steps
            is_due = training.step % self.tuning.check_every == 0 or is_last
            if is_due and training.checked < training.step:
                self._check()
            if is_last or not training.active:
                break
            self._step()
            size = self.tuning.rows_per_step
            finished, n = sum(training.stopped.values()), len(training.active)
            done, total = finished + n * training.step, finished + n * self.tuning.steps
            progress("tuning", done * size, total * size, "rows x layers")
            saver.save_if_due()
        saver.save()

    def _starts(self) -> list[Map]:
        if self.tuning.start == "linear":
            check_starts(self.origin, self.layers)
            return list(self.closed)
        # A matrix each: tensors that share memory cannot be saved.
        eyes = [torch.eye(self.origin.d_model, device=self.device) for _ in self.closed]
        return [
            TunedMap(m.src, m.dst, weight=eye) for m, eye in zip(self.closed, eyes, strict=True)
        ]

    def _about(self) -> dict[str, Any]:
        """What a resumed run must have in common."""
        digest = hashlib.sha256()
        for linear in self.closed:
            for name, value in linear.tensors().items():
                digest.update(f"{linear.src} {name}".encode() + value.cpu().numpy().tobytes())
        return {
            "model": self.transformer.identity.fingerprint,
            "tuning": asdict(self.tuning),
            "layers": self.layers,
            "maps": digest.hexdigest(),
            "states": self.states.fingerprint(),
            "held_out": self.held_out.fingerprint(),
        }

    def _check(self) -> None:
        """Measure on the held-out states, and stop layers that no longer improve."""
        training = self.training
        if training.step == 0 and self.tuning.start != "linear":  # the closed form, to compare with
            for layer, measured in self._measure({m.src: m for m in self.closed}).items():
                training.add_check(layer, "linear", 0, *measured, best=True)
        active = {layer: training.translators[layer] for layer in training.active}
        rows_seen = training.step * self.tuning.rows_per_step
        for layer, (kl, agreement) in self._measure(active).items():
            if training.step == 0 and not kl < math.inf:
                raise NotFinite(
                    f"the start map of layer {layer} gives NaN or infinite logits on held-out "
                    "rows; use a wider dtype, or fit the map on more rows"
                )
            best = training.is_best(layer, kl, self.tuning.patience)
            training.add_check(layer, self.tuning.start, rows_seen, kl, agreement, best=best)
        training.checked = training.step

    def _measure(self, maps: dict[int, Any]) -> dict[int, tuple[float, float]]:
        """Per layer: mean KL in nats, and the share of rows with the model's top token."""
        kl, agreed = dict.fromkeys(maps, 0.0), dict.fromkeys(maps, 0)
        size = rows_at_once(self.transformer.d_vocab)
        for start in range(0, len(self.held_out), size):
            states = self.held_out.states(slice(start, start + size)).to(self.device)
            answers = Answers(self.transformer, states[:, -1])
            for layer, carry in maps.items():
                divergence, agrees = answers.compare(carry(states[:, layer]))
                kl[layer] += divergence.sum().item()
                agreed[layer] += int(agrees.sum())
        n = len(self.held_out)
        return {layer: (kl[layer] / n, agreed[layer] / n) for layer in maps}

    def _step(self) -> None:
        """One batch: the model's output once, then each layer's gradient and update."""
        training, tuning = self.training, self.tuning
        started = time.perf_counter()
        rows = batch(len(self.states), tuning.rows_per_step, training.step, tuning.seed)
        states = self.states.states(rows).to(self.device)
        p = logits_of(self.transformer, states[:, -1]).softmax(-1)
        shared = (time.perf_counter() - started) / len(training.active)
        lr = tuning.lr * (1 - training.step / tuning.steps)
        for layer in training.active:
            started = time.perf_counter()
            translator, x = training.translators[layer], states[:, layer]
            white = translator.whitened(x)
            at_last = kl_gradient(self.transformer, translator(x, white), p).to(white.device)
            translator.update(translator.gradient(white, at_last), lr, training.step + 1)
            spent = shared + time.perf_counter() - started
            training.seconds[layer] = training.seconds.get(layer, 0.0) + spent
        training.step += 1

    def bank(self) -> ShortcutBank:
        """The tuned bank; fit reports of maps that were replaced are dropped."""
        origin, training = self.origin, self.training
        unimproved = {layer for layer, t in training.translators.items() if not t.best.any()}
        unchanged = unimproved if self.tuning.start == "linear" else set()
        tuned = {
            (layer, origin.n_layers): t.result().to("cpu")
            for layer, t in training.translators.items()
            if layer not in unchanged
        }
        fits = [fit for pair, fit in origin.fits.items() if pair not in tuned]
        steps = [training.stopped.get(layer, training.step) for layer in self.layers]
        settings = {
            **asdict(self.tuning),
            "layers": self.layers,
            "never_improved": sorted(unimproved),
            "rows_seen": [n * self.tuning.rows_per_step for n in steps],
        }
        rows = {
            "rows_tuned_on": len(self.states),
            "rows_tuning_held_out": len(self.held_out),
            "evaluated_on": "the rows that decided when training stopped",
        }
        return origin.changed(
            maps=({**origin.maps, **tuned}).values(),
            fits=[*fits, *origin.part_fits.values()],
            settings={**origin.settings, "tuning": settings},
            data={**origin.data, **rows},
            quality=self._quality(),
            source=f"{origin.source}, tuned",
        )

    def _quality(self) -> list[dict[str, Any]]:
        """Scores of the final maps on the states that decided when to stop."""
        n, start, record = len(self.held_out), self.tuning.start, self.training.record
        best = {row["layer"]: row for row in record if row["best"] and row["start"] == start}
        return [
            {"layer": layer, "rows": n, "kl": row["kl"], "precision@1": row["agreement"]}
            for layer, row in sorted(best.items())
        ]


def batch(n_rows: int, size: int, step: int, seed: int) -> Tensor:
    """The rows of step `step` (from 0): every row once in random order, then all again."""
    numbers = np.arange(step * size, (step + 1) * size)
    epochs = numbers // n_rows
    rows = []
    for epoch in np.unique(epochs).tolist():
        order = np.random.default_rng([seed, epoch]).permutation(n_rows)
        rows.append(order[numbers[epochs == epoch] % n_rows])
    return torch.from_numpy(np.concatenate(rows))


def summary(record: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per layer and start: when training overtook the closed form, and where it ended.

    `record` may combine several runs. rows_needed and seconds_needed belong to the first check with
    a lower KL than the closed form, and are None if there is none. kl_tuned and agreement_tuned
    belong to the final map; `improved` is False if that is the start map.
    """
    closed = {r["layer"]: r for r in record if (r["start"], r["rows_seen"]) == ("linear", 0)}
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in record:
        runs.setdefault((row["layer"], row["start"]), []).append(row)
    table = []
    for (layer, start), rows in sorted(runs.items()):
        later = [row for row in rows if row["rows_seen"]]
        if not later:
            continue  # the closed form, recorded for comparison
        final, base = [row for row in rows if row["best"]][-1], closed[layer]
        ahead = (row for row in later if row["kl"] is not None and row["kl"] < base["kl"])
        first: dict[str, Any] = next(ahead, {})
        row = {"layer": layer, "start": start, "rows_needed": first.get("rows_seen")}
        row["seconds_needed"] = first.get("seconds")
        for key in ("kl", "agreement"):
            row |= {f"{key}_closed": base[key], f"{key}_tuned": final[key]}
        table.append({**row, "improved": final["rows_seen"] > 0})
    return table


@dataclass(frozen=True, eq=False, repr=False)
class Tuned(ShortRepr, Result):
    """A fine-tuned bank, and the record of its training: a row per layer and check."""

    TABLES: ClassVar[tuple[Table, ...]] = (
        Table(
            "summary",
            "tuned against the closed form, on documents not trained on",
            lambda tuned: tuned.summary,
            (
                Column("layer"),
                Column("kl_closed", "KL, closed form", "{:.3f}"),
                Column("kl_tuned", "KL, tuned", "{:.3f}"),
                Column("agreement_closed", "agreement, closed form", "{:.1f} %", 100),
                Column("agreement_tuned", "agreement, tuned", "{:.1f} %", 100),
                Column("rows_needed", "rows until ahead", "{:,.0f}", words={None: "never"}),
            ),
        ),
        Table("record", "", lambda tuned: tuned.record),
    )

    bank: ShortcutBank
    record: list[dict[str, Any]]

    @property
    def summary(self) -> list[dict[str, Any]]:
        """Per layer: the closed form beside the tuned map, and when training overtook it."""
        return summary(self.record)

    def headline(self) -> str:
        """The bank."""
        return repr(self.bank)

    def facts(self) -> Row:
        """The number of maps."""
        return {"maps": len(self.bank)}


@checked
def tune(
    transformer: Transformer,
    bank: ShortcutBank,
    text: Any = None,
    sampling: Sampling | None = None,
    *,
    starts: str | None = None,
    n_texts: int | None = 1500,
    max_states: int = 24_000,
    stop_share: float = 0.05,
    tuning: Tuning | None = None,
    folder: str | Path | None = None,
    evaluate: bool = True,
    progress: Progress | bool = True,
) -> Tuned:
    """Train the maps of a bank until their readings come close to the model's own output.

        tuned = ll.tune(model, bank, "wikipedia")
        tuned.bank.save_pretrained("tuned")

    No map ends up worse on the documents that decide when to stop than it started. If the bank was
    fitted on the same text, it has seen those documents, too.

    Args:
        text: anything that `ll.fit` accepts; None is the model's default text.
        sampling: how texts are cut and positions chosen.
        starts: a text of real sequences from which a masked model generates its texts.
        n_texts: texts to take states from; None takes all.
        max_states: states to keep on disk, a random sample of all.
        stop_share: share of the documents that decide when a layer stops.
        folder: where states and checkpoints are kept, to continue after an interruption. Delete
            it once the bank is saved.
        evaluate: score the tuned bank on a few held-out documents, for its card.
        progress: a function to call, True for bars on a terminal or in a notebook, or False.
    """
    tuning = tuning or Tuning()
    bank.check_model(transformer)
    if tuning.start == "linear":
        check_starts(bank)
    sampling = sampling or Sampling(
        unit="paragraph", positions="one" if transformer.kind == "masked-token" else "every:4"
    )
    place = TemporaryDirectory(prefix="layerleap-") if folder is None else nullcontext(folder)
    with place as name, reporting(progress) as report:
        work = Path(name)
        work.mkdir(parents=True, exist_ok=True)
        file = StateFile(work / "states", limit=max_states, seed=tuning.seed)
        stats = collect(
            transformer,
            text,
            sampling,
            starts=starts,
            n_texts=n_texts,
            save_states=file,
            checkpoint=work / "pass.safetensors",
            progress=report,
        )
        sides = file.open().split(stop_share, tuning.seed)
        checkpoint = work / "training.safetensors"
        tuned, record = tune_maps(
            transformer, bank, *sides, tuning, checkpoint=checkpoint, progress=report
        )
        if bank.documents is not None:
            tuned = tuned.changed(documents=bank.documents | (stats.documents or set()))
        if evaluate:
            tuned = with_scores(transformer, tuned, text, progress=report)
        return Tuned(tuned, record)
