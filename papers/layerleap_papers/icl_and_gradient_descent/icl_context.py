"""What the sections of the study of in-context learning share.

In: a model and settings. Out: tasks in tokens, draws, lenses, the untrained twin, and the
measurements of each task and seed, which are saved as soon as they are made.
"""

from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerleap import Lens, ShortcutBank, Transformer, default_bank, tune
from layerleap.act.learning import InContext, answered
from layerleap.errors import BadArtifact, BadSettings, BadText, NotFinite
from layerleap.files import read_json, write_json
from layerleap.maps import Tuning
from layerleap.models import untrained_blocks
from layerleap.stats import TensorFile
from layerleap.stream.tasks import Draw, EncodedTask, draw, encode, load
from layerleap.study import Context
from layerleap_papers.icl_and_gradient_descent.icl_settings import IclSettings

CELL = TensorFile("icl", 3)
FAILED = "failed/"  # marks a training that ended with NaN or infinity
STEP = 256  # rows of one step of tuning
FIRST_QUERIES = 50  # per seed, that tell whether a task is learned in context


class IclContext(Context[IclSettings]):
    """Tasks, draws, lenses and measurements."""

    _untrained: tuple[int, Transformer] | None = None

    @cached_property
    def encoded(self) -> dict[str, EncodedTask]:
        """Every task in tokens, by name."""
        s = self.settings
        how = {"template": s.template, "field": s.field, "label": s.label, "labels": s.labels}
        tasks = [load(source, **how) for source in s.tasks]  # type: ignore[arg-type]
        encoded = [encode(self.model, task, can_score=False) for task in tasks]
        by_name = {one.task.name: one for one in encoded}
        if len(by_name) < len(encoded):
            names = ", ".join(task.name for task in tasks)
            raise BadSettings(f"two of the tasks {names} have the same name; rename one")
        return by_name

    def fingerprint(self) -> Any:
        """Digests of the tasks."""
        return {name: one.task.digest for name, one in self.encoded.items()}

    @property
    def seeds(self) -> list[int]:
        """The seeds of all draws."""
        return [self.settings.seed + n for n in range(self.settings.seeds)]

    def draw(self, task: str, seed: int) -> Draw:
        """Demonstrations and queries; refuses demonstrations that do not fit the context."""
        encoded, s = self.encoded[task], self.settings
        drawn = draw(
            encoded, seed, demonstrations=s.demonstrations, queries=s.queries, search=s.search
        )
        encoded.require_fit(drawn.demonstrations, [*drawn.queries, *drawn.search])
        if len(drawn.queries) < s.queries:
            self.note(
                f"{task}: {len(drawn.queries)} queries per seed, and {len(drawn.search)} to choose "
                f"learning rates on; it has {len(encoded.pieces)} examples whose answers are one "
                "token."
            )
        return drawn

    def in_context(self, task: str) -> InContext:
        """Accuracy in context: the demonstrations of the rest of the study, its first queries.

        More demonstrations than that follow the same ones. They are examples that no query of this
        measurement is, as many as there are and as fit before the queries of every seed.
        """
        s, encoded = self.settings, self.encoded[task]
        own = [self.draw(task, seed).extended(FIRST_QUERIES, s.shots[-1]) for seed in self.seeds]
        room = min(len(one.demonstrations) for one in own)
        fit = min(encoded.fitting(one.demonstrations[:room], one.queries) for one in own)
        if left := [n for n in s.shots if n > fit]:
            self.note(
                f"{task}: {', '.join(map(str, left))} demonstrations are left out, because the "
                "context or the task is too small for them."
            )
        shots = [n for n in s.shots if n <= fit]
        return answered(self.model, encoded, own, shots, self.progress)

    @cached_property
    def lenses(self) -> dict[str, Lens]:
        """The lenses of the layer-causal loss, by way of training."""
        lenses = {"lcgd-logit": Lens(self.model)}
        if "linear" in self.settings.lenses:
            lenses["lcgd-linear"] = Lens(self.model, self.bank)
        if "tuned" in self.settings.lenses:
            lenses["lcgd-tuned"] = Lens(self.model, self.tuned)
        return lenses

    @cached_property
    def bank(self) -> ShortcutBank:
        """The bank given, or the cached one, fitted now if there is none."""
        if self.settings.bank is not None:
            assert not isinstance(self.settings.bank, str)  # loaded in `resolved`
            return self.settings.bank
        return default_bank(self.model, progress=self.progress)

    @cached_property
    def tuned(self) -> ShortcutBank:
        """The tuned bank given, or one trained a little; saved for a run that continues."""
        if self.settings.tuned is not None:
            assert not isinstance(self.settings.tuned, str)
            return self.settings.tuned
        folder = self.workspace / "tuned"
        if folder.is_dir():
            try:
                return ShortcutBank.from_pretrained(folder)
            except BadArtifact:  # incomplete: train again
                pass
        rows = self.settings.tuned_rows
        tuning = Tuning(
            max_rows=rows,
            rows_per_step=STEP,
            check_every=max(1, rows // STEP // 2),
            seed=self.settings.seed,
        )
        self.note(
            f"The tuned maps were trained on {rows:,} rows from the shortcuts on; `layerleap tune` "
            "trains longer."
        )
        bank = tune(
            self.model,
            self.bank,
            n_texts=max(200, rows // 5),
            max_states=2 * rows,
            tuning=tuning,
            folder=self.workspace / "tuning",
            evaluate=False,
            progress=self.progress,
        ).bank
        bank.save_pretrained(folder)
        return bank

    def untrained_control(self, seed: int) -> Transformer:
        """The same model with untrained blocks, drawn anew for each seed; the last one is kept."""
        if self._untrained is None or self._untrained[0] != seed:
            self._untrained = None  # frees the one before
            self._untrained = seed, untrained_blocks(self.model, seed=seed)
        return self._untrained[1]

    def rate(self, task: str, way: str) -> float:
        """The learning rate that was chosen for a task and a way."""
        for row in self.tables["rates"]:
            if (row["task"], row["way"]) == (task, way) and row["chosen"]:
                return float(row["rate"])
        raise NotFinite(f"no learning rate works for {way} on {task}")

    def path(self, kind: str, task: str, *more: Any, suffix: str = "json") -> Path:
        """A file of the workspace for a task and whatever else."""
        digest = blake2b(repr((task, more)).encode(), digest_size=4).hexdigest()
        readable = "".join(c if c.isalnum() else "-" for c in task)[-30:]
        return self.workspace / f"{kind}-{readable}-{digest}.{suffix}"

    def saved_json(self, path: Path) -> Any:
        """What an interrupted run saved; None if there is nothing, or it is damaged."""
        try:
            return read_json(path) if path.exists() else None
        except BadArtifact:
            return None

    def save_json(self, path: Path, value: Any) -> Any:
        """Save plain values, for a run that continues."""
        write_json(path, value)
        return value

    def cell(self, task: str, seed: int) -> dict[str, Tensor]:
        """The measurements of one task and seed, made now or by an interrupted run."""
        from layerleap_papers.icl_and_gradient_descent.conditions import (
            measure,  # which needs this context
        )

        path = self.path("cell", task, seed, suffix="safetensors")
        if path.exists():
            try:
                return CELL.load(path)[0]
            except BadArtifact:  # damaged: measure again
                pass
        tensors = measure(self, task, seed)
        CELL.save(path, tensors, {"task": task, "seed": seed})
        return tensors

    def cells(self) -> Iterator[tuple[str, list[dict[str, Tensor]]]]:
        """All measurements: by task, one per seed."""
        for number, task in enumerate(self.encoded):
            self.progress("learning", number, len(self.encoded), "tasks")
            yield task, [self.cell(task, seed) for seed in self.seeds]

    def require_queries(self, drawn: Draw) -> None:
        """Refuse a draw with too few queries for its controls."""
        if len(drawn.queries) < 2:
            raise BadText("there are fewer than two queries; shuffled queries are a control")


def merged(cells: list[dict[str, Tensor]], key: str) -> list[Tensor]:
    """One measurement of all seeds; empty if a seed lacks it."""
    return [cell[key] for cell in cells] if all(key in cell for cell in cells) else []


def layer_mean(values: Tensor) -> Tensor:
    """The mean over layers, with blocks left out where nothing changed: (query, 1)."""
    return torch.nanmean(values.double(), 1, keepdim=True)
