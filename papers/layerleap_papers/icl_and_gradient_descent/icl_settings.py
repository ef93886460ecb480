"""Settings of the study of in-context learning.

In: plain values. Out: `IclSettings`, checked.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from layerleap import ShortcutBank, Transformer
from layerleap.act.learning import Tokens, choose
from layerleap.errors import BadSettings, check_choice
from layerleap.stream.tasks import Task, parse_labels, require_decoder
from layerleap.study import Settings, option

LENSES = ("logit", "linear", "tuned")
SHOTS = (1, 2, 4, 8, 16, 32)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _words(text))
    except ValueError as error:
        raise BadSettings(f"rates are {text!r}; expected numbers separated by commas") from error


def _few(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Three of the rates at most: the lowest, a middle one and the highest."""
    ordered = sorted(rates)
    places = {0, len(ordered) // 2, len(ordered) - 1}
    return tuple(ordered[place] for place in sorted(places))


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
        unused = {"bank": {"linear", "tuned"}, "tuned": {"tuned"}}
        for name, users in unused.items():
            if getattr(self, name) is not None and not users & set(self.lenses):
                raise BadSettings(f"a {name} bank was given, but lenses are {self.lenses}")

    def _check_tasks(self) -> None:
        given = self.tasks
        if isinstance(given, str | Task):  # one task, or names separated by commas
            given = _words(given) if isinstance(given, str) else (given,)
        object.__setattr__(self, "tasks", tuple(given))
        named = [task.name if isinstance(task, Task) else str(task) for task in self.tasks]
        if not named or len(set(named)) < len(named):
            raise BadSettings(f"tasks are {', '.join(named) or 'none'}; expected each once")

    def scaled_down(self) -> Self:
        """One seed, one task, few demonstrations and queries, and the logit lens alone."""
        asked = self.demonstrations if self.demonstrations != IclSettings.demonstrations else 0
        return replace(
            super().scaled_down(),
            tasks=self.tasks[:1],
            most=min(self.most, max(8, asked)),
            rates=_few(self.rates),
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


def _bank(bank: ShortcutBank | str | None, model: Transformer) -> Any:
    found = ShortcutBank.from_pretrained(bank) if isinstance(bank, str) else bank
    if found is not None:
        found.check_model(model)
    return found
