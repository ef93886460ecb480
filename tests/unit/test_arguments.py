"""Wrong types and choices are refused in one line, before anything is computed."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

import layerleap as ll
from layerleap.arguments import check_fields, checked
from layerleap.errors import BadSettings
from layerleap.models.transformer import Transformer
from tiny_models import tiny


@checked
def verb(
    model: Transformer | None = None,
    text: str | Path = "",
    *,
    n: int | None = None,
    share: float = 0.5,
    side: Literal["fit", "both"] = "fit",
    choice: Literal["raw", "unit"] | None = None,
    positions: Literal["all", "last"] | Sequence[int] = "all",
    layers: Sequence[int] | None = None,
    live: bool = False,
    call: Callable[[str], None] = lambda _: None,
    anything: Any = None,
    **options: Any,
) -> str:
    """What it does."""
    return "done"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "smollm2"}, "model is 'smollm2'; expected a model from ll.load or None"),
        ({"model": torch.nn.Linear(1, 1)}, "model is a Linear; expected a model from ll.load"),
        ({"text": 5}, "text is 5; expected a string or a Path"),
        ({"text": b"x"}, "text is b'x'; expected a string"),
        ({"text": ["a"]}, r"text is \['a'\]; expected a string"),
        ({"n": "5"}, "n is '5'; expected a whole number or None"),
        ({"n": 2.5}, "n is 2.5; expected a whole number"),
        ({"n": True}, "n is True; expected a whole number"),
        ({"share": "0.5"}, "share is '0.5'; expected a number"),
        ({"share": None}, "share is None; expected a number"),
        ({"side": "Fit"}, "side is 'Fit'; expected one of 'fit', 'both'; did you mean 'fit'"),
        ({"side": 3}, "side is 3; expected one of 'fit', 'both'"),
        ({"choice": "row"}, "choice is 'row'; expected one of 'raw', 'unit'; did you mean 'raw'"),
        ({"positions": "first"}, "positions is 'first'; expected one of 'all', 'last' or a list"),
        (
            {"positions": 3},
            "positions is 3; expected one of 'all', 'last' or a list of whole numbers",
        ),
        ({"layers": ["3"]}, r"layers is \['3'\]; expected a list of whole numbers"),
        ({"layers": 3}, "layers is 3; expected a list"),
        ({"layers": "123"}, "layers is '123'; expected a list"),
        ({"live": "yes"}, "live is 'yes'; expected True or False"),
    ],
    ids=str,
)
def test_a_wrong_type_is_refused_in_one_line(arguments, message):
    with pytest.raises(BadSettings, match=message) as caught:
        verb(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": Path("x")},
        {"n": np.int64(3)},
        {"share": 1},
        {"share": np.float32(0.5)},
        {"positions": (1, 2)},
        {"positions": range(3)},
        {"positions": torch.tensor([1])},
        {"layers": np.array([1])},
        {"layers": {1, 2}},
        {"layers": []},
        {"anything": object()},
        {"call": print},
        {"more": 3},
    ],
)
def test_what_would_work_is_accepted(arguments):
    assert verb(**arguments) == "done"


def test_a_missing_or_unknown_argument_stays_a_type_error():
    @checked
    def strict(model: int) -> int:
        return model

    with pytest.raises(TypeError, match="missing"):
        strict()
    with pytest.raises(TypeError, match="unexpected keyword"):
        strict(1, modle=2)
    assert strict.__doc__ is None
    assert verb.__doc__ == "What it does."


def test_fields_of_settings_are_checked():
    @dataclass(frozen=True)
    class Settings:
        n: int = 1
        unit: Literal["word", "line"] = "word"

        def __post_init__(self) -> None:
            check_fields(self)

    Settings(2, "line")
    with pytest.raises(BadSettings, match="n is '2'; expected a whole number"):
        Settings("2")
    with pytest.raises(BadSettings, match=r"unit is 'lines'.*did you mean 'line'"):
        Settings(2, "lines")


def test_a_mistyped_option_of_a_verb_brings_the_one_that_was_meant():
    for verb, wrong, meant in (
        (ll.fit, "n_text", "n_texts"),
        (ll.evaluate, "n_text", "n_texts"),
        (ll.tune, "max_state", "max_states"),
        (ll.finetune, "learning_rates", "learning_rate"),
        (ll.read, "top", "top_k"),
        (ll.studies.suitability, "tolerence", "tolerance"),
        (ll.exits.evidence, "n_text", "n_texts"),
    ):
        with pytest.raises(BadSettings, match=f"'{wrong}'.*did you mean '{meant}'") as caught:
            verb(tiny("llama"), **{wrong: 1})
        assert isinstance(caught.value, TypeError)


def test_fit_names_all_of_its_options():
    names = inspect.signature(ll.fit).parameters
    assert {"n_texts", "pairs", "parts", "checkpoint", "shard", "starts"} <= names.keys()
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in names.values())
