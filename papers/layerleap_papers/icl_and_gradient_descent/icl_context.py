"""Settings of the study of in-context learning, and what its sections share.

In: a model and plain values. Out: `IclSettings`, checked; and a context with tasks in tokens,
draws, lenses, the untrained control, and the measurements of each task and seed, which are saved as
soon as they are made.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from layerleap import Lens, ShortcutBank, Transformer, default_bank, tune
from layerleap.act.learning import InContext, Tokens, answered, choose
from layerleap.errors import BadArtifact, BadSettings, NotFinite, check_choice
from layerleap.files import read_json, write_json
from layerleap.lens import ANY, Bounds, nested_means
from layerleap.maps import Tuning
from layerleap.models import untrained_blocks
from layerleap.stats import TensorFile
from layerleap.stream.tasks import (
    Draw,
    EncodedTask,
    Task,
    draw,
    encode,
    load,
    parse_labels,
    require_decoder,
)
from layerleap.study import Context, Line, Row, Settings, option

T = TypeVar("T")
LENSES = ("logit", "linear", "tuned")
SHOTS = (1, 2, 4, 8, 16, 32)
LINES = {
    "gd": Line("gradient descent", "orange", marker="s", style="dashed"),
    "lcgd-logit": Line("layer-causal (logit lens)", "blue"),
    "lcgd-linear": Line("layer-causal (shortcuts)", "purple", marker="^"),
    "lcgd-tuned": Line("layer-causal (tuned lens)", "green", marker="D"),
}
NAMES = {way: line.label for way, line in LINES.items()}
CELL = TensorFile("icl", 3)
FAILED = "failed/"  # marks a training that ended with NaN or infinity
STEP = 256  # rows of one step of tuning
FIRST_QUERIES = 50  # per seed, that tell whether a task is learned in context


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _words(text))
    except ValueError as error:
        raise BadSettings(f"rates are {text!r}; expected numbers separated by commas") from error


@dataclass(frozen=True)
class IclSettings(Settings):
    """What the study of in-context learning does, and with how much data."""

    tasks: tuple[str | Task, ...] = option(
        ("opposites", "kinds", "reviews"),
        "A task: a bundled one (`layerleap tasks` lists them), or a .jsonl, .csv or .parquet file "
        "with the fields text and label. Repeat it, or separate several by commas.",
        flags=("--task", "--tasks"),
        parse=_words,
        repeats=True,
    )
    template: str | None = option(
        None, "How a text becomes a prompt, with {text} in it; it ends where the answer begins."
    )
    field: str = option("text", "The field of files that holds the text.")
    label: str = option("label", "The field of files that holds the answer.")
    labels: Mapping[str, str] | None = option(
        None,
        "Words for the values of that field, such as 0=Negative,1=Positive.",
        parse=parse_labels,
    )
    seeds: int = option(3, "How often demonstrations and queries are drawn.", least=1, quick=1)
    demonstrations: int = option(
        16, "Demonstrations that are shown, and trained on.", least=1, quick=8
    )
    queries: int = option(100, "Queries per task and seed, at most.", least=4, quick=30)
    most: int = option(
        32, "Demonstrations shown at most, to see whether in-context learning works."
    )
    search: int = option(
        24, "Other queries, on which learning rates are chosen.", least=2, quick=10
    )
    rates: tuple[float, ...] = option(
        (0.0003, 0.001, 0.003),
        "Learning rates to begin the search with, the same for all ways of training; separated by "
        "commas. It goes on beyond the lowest or highest if that is the best.",
        parse=_numbers,
    )
    lenses: tuple[str, ...] = option(
        LENSES,
        "What the layer-causal loss is read through: logit (logit lens, as in the paper), linear "
        "(linear shortcuts), tuned (tuned lens); separated by commas.",
        parse=_words,
    )
    parameters: str = option(
        "keys-values",
        "Which parameters learn: keys-values as in the paper, blocks, or patterns of names; "
        "separated by commas.",
    )
    tokens: str = option(
        "answer",
        "Which tokens of a demonstration are trained on: its answer, or all as in the paper.",
    )
    bank: ShortcutBank | str | None = option(  # noqa: RUF009
        None, "Folder or hub name of a bank of shortcuts; fitted and cached by default.", parse=str
    )
    tuned: ShortcutBank | str | None = option(  # noqa: RUF009
        None, "Folder or hub name of a bank of tuned maps; trained a little by default.", parse=str
    )
    tuned_rows: int = option(
        2048, "Rows that tuned maps are trained on, if none are given.", least=256
    )
    seed: int = option(0, "The first seed.")

    def __post_init__(self) -> None:
        self._check_tasks()
        super().__post_init__()
        if self.most < self.demonstrations:
            raise BadSettings(
                f"most is {self.most}; expected at least the {self.demonstrations} demonstrations "
                "that are trained on"
            )
        if not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise BadSettings(f"rates are {list(self.rates)}; expected numbers above 0")
        for lens in self.lenses:
            check_choice(lens, LENSES, "lenses")
        if "logit" not in self.lenses:
            raise BadSettings(
                "lenses lack logit, the paper's; expected logit, alone or with linear, tuned"
            )
        check_choice(self.tokens, Tokens, "tokens")
        users_of = {"bank": {"linear", "tuned"}, "tuned": {"tuned"}}
        for name, users in users_of.items():
            if getattr(self, name) is not None and not users & set(self.lenses):
                raise BadSettings(f"a {name} bank was given, but lenses are {self.lenses}")

    def _check_tasks(self) -> None:
        tasks = self.tasks
        if isinstance(tasks, str | Task):  # one task, or names separated by commas
            tasks = _words(tasks) if isinstance(tasks, str) else (tasks,)
        object.__setattr__(self, "tasks", tuple(tasks))
        named = [task.name if isinstance(task, Task) else str(task) for task in self.tasks]
        if not named or len(set(named)) < len(named):
            raise BadSettings(f"tasks are {', '.join(named) or 'none'}; expected each once")

    def scaled_down(self) -> Self:
        """One seed, one task, few demonstrations and queries, and the logit lens alone."""
        asked = self.demonstrations if self.demonstrations != IclSettings.demonstrations else 0
        rates, n = sorted(self.rates), len(self.rates)
        few = dict.fromkeys((rates[0], rates[n // 2], rates[-1]))
        return replace(
            super().scaled_down(),
            tasks=self.tasks[:1],
            most=min(self.most, max(8, asked)),
            rates=tuple(few),
            lenses=("logit",),
            bank=None,
            tuned=None,
        )

    @property
    def chosen_parameters(self) -> tuple[str, ...]:
        """The words or patterns that choose what learns."""
        return _words(self.parameters)

    def resolved(self, model: Transformer) -> Self:
        """The settings with banks loaded."""
        require_decoder(model)
        choose(model, self.chosen_parameters)  # refuses mistyped ones before anything runs
        return replace(self, bank=_bank(self.bank, model), tuned=_bank(self.tuned, model))

    @property
    def ways(self) -> tuple[str, ...]:
        """Ways to train: plain gradient descent, and layer-causal through each lens."""
        return ("gd", *(f"lcgd-{lens}" for lens in LENSES if lens in self.lenses))

    @property
    def stops(self) -> tuple[int, ...]:
        """Numbers of demonstrations after which training is looked at; the last is all."""
        some = [n for n in (1, 4) if n < self.demonstrations]
        return (*some, self.demonstrations)

    @property
    def shots(self) -> list[int]:
        """Numbers of demonstrations that are shown to see whether learning works."""
        return sorted({0, *(n for n in SHOTS if n <= self.most), self.demonstrations})


def _bank(bank: ShortcutBank | str | None, model: Transformer) -> ShortcutBank | None:
    loaded = ShortcutBank.from_pretrained(bank) if isinstance(bank, str) else bank
    if loaded is not None:
        loaded.check_model(model)
    return loaded


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
        draws = [self.draw(task, seed).extended(FIRST_QUERIES, s.shots[-1]) for seed in self.seeds]
        room = min(len(one.demonstrations) for one in draws)
        fit = min(encoded.fitting(one.demonstrations[:room], one.queries) for one in draws)
        if left := [n for n in s.shots if n > fit]:
            self.note(
                f"{task}: {', '.join(map(str, left))} demonstrations are left out, because the "
                "context or the task is too small for them."
            )
        shots = [n for n in s.shots if n <= fit]
        return answered(self.model, encoded, draws, shots, self.progress)

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
        self.note(
            f"The tuned maps were trained on {rows:,} rows from the shortcuts on; `layerleap tune` "
            "trains longer."
        )
        checks = max(1, rows // STEP // 2)
        bank = tune(
            self.model,
            self.bank,
            n_texts=max(200, rows // 5),
            max_states=2 * rows,
            tuning=Tuning(rows, rows_per_step=STEP, check_every=checks, seed=self.settings.seed),
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

    def _path(self, kind: str, task: str, *more: Any, suffix: str = "json") -> Path:
        """A file of the workspace for a task and whatever else."""
        digest = blake2b(repr((task, more)).encode(), digest_size=4).hexdigest()
        readable = "".join(c if c.isalnum() else "-" for c in task)[-30:]
        return self.workspace / f"{kind}-{readable}-{digest}.{suffix}"

    def saved(self, make: Callable[[], T], kind: str, task: str, *more: Any) -> T:
        """Plain values: those that an interrupted run saved, or made and saved now."""
        path = self._path(kind, task, *more)
        if path.exists():
            try:
                values: T = read_json(path)
                return values
            except BadArtifact:  # damaged: make them again
                pass
        values = make()
        write_json(path, values)
        return values

    def cell(self, task: str, seed: int) -> dict[str, Tensor]:
        """The measurements of one task and seed, made now or by an interrupted run."""
        from layerleap_papers.icl_and_gradient_descent import conditions  # which needs this context

        path = self._path("cell", task, seed, suffix="safetensors")
        if path.exists():
            try:
                return CELL.load(path)[0]
            except BadArtifact:  # damaged: measure again
                pass
        tensors = conditions.measure(self, task, seed)
        CELL.save(path, tensors, {"task": task, "seed": seed})
        return tensors

    def cells(self) -> Iterator[tuple[str, list[dict[str, Tensor]]]]:
        """All measurements: by task, one per seed."""
        for number, task in enumerate(self.encoded):
            self.progress("learning", number, len(self.encoded), "tasks")
            yield task, [self.cell(task, seed) for seed in self.seeds]


def merged(cells: list[dict[str, Tensor]], key: str) -> list[Tensor]:
    """One measurement of all seeds; empty if a seed lacks it."""
    return [cell[key] for cell in cells] if all(key in cell for cell in cells) else []


def layer_mean(values: Tensor) -> Tensor:
    """The mean over layers, with blocks left out where nothing changed: (query, 1)."""
    return torch.nanmean(values.double(), 1, keepdim=True)


def mean_of(groups: list[Tensor], bounds: Bounds = ANY) -> Row:
    """The mean of a value per query over all seeds, with its interval."""
    columns = [group.double().reshape(-1, 1) for group in groups]
    return nested_means(columns, bounds=bounds)[0].to_dict()
