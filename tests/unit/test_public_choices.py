"""A mistyped choice is never taken for another one: it is refused, and the choices are listed."""

import inspect
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal

import pytest
import torch

import layerleap as ll
from contract_bank import bank_of
from layerleap.errors import BadSettings, check_choice
from layerleap.lens.lens import read
from layerleap.maps.bank import ShortcutBank
from layerleap.models.transformer import Transformer
from tiny_models import sentences, tiny

NAMESPACES = ("edits", "exits", "learning", "stats", "studies", "tasks", "zoo")
CLASSES = ("Evaluation", "Generation", "Lens", "Readings", "ShortcutBank", "StudyResult")
CLASSES += ("Transformer",)
# Made by layerleap and given back to the caller, who types none of their fields.
RESULTS = {*CLASSES, "exits.Calibrated", "exits.Timing", "zoo.Entry"} - {"Lens", "ShortcutBank"}


@cache
def model() -> Transformer:
    return tiny("llama")


@cache
def bank() -> ShortcutBank:
    return bank_of(model())


@cache
def direction() -> ll.Direction:
    return ll.direction(model(), sentences(4), sentences(4, 1), layer=2, progress=False)


PAIRS = [("the cat", "big"), ("the dog", "small"), ("the sun", "big"), ("the moon", "small")]
# What each function needs besides the choice. A choice is checked before anything is read.
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "Decoder": lambda: (bank(),),
    "decoder": lambda: (bank(),),
    "Sampling": tuple,
    "Transformer.wrap": lambda: (model().model,),
    "attribute": lambda: (model(), "the cat"),
    "check": lambda: (model().model,),
    "diff": lambda: (model(), model()),
    "direction": lambda: (model(), sentences(4), sentences(4)),
    "edits.AddNeuron": lambda: (1, 0, 1.0),
    "edits.AddVector": lambda: (1, torch.ones(24)),
    "edits.ClampAlong": lambda: (1, torch.ones(24)),
    "edits.MeanHead": lambda: (1, 0),
    "edits.ProjectOut": lambda: (1, torch.ones(24)),
    "edits.ScaleHead": lambda: (1, 0, 1.0),
    "edits.ScaleSite": lambda: (1, "attn", 1.0),
    "edits.SetHead": lambda: (1, 0, torch.ones(6)),
    "edits.ZeroHead": lambda: (1, 0),
    "edits.ZeroSite": lambda: (1, "attn"),
    "edits.ScaleNeuron": lambda: (1, 0, 1.0),
    "edits.SetNeuron": lambda: (1, 0, 1.0),
    "edits.TopKNeurons": lambda: (3,),
    "edits.ZeroNeuron": lambda: (1, 0),
    "evaluate": lambda: (model(), bank(), sentences(8)),
    "exits.calibrate": lambda: (None, None, 0.05),
    "exits.rows_needed": lambda: (0.05, 0.05),
    "exits.saved_at": lambda: (None, None),
    "exits.split": lambda: (None, [0.5]),
    "fit": lambda: (model(), sentences(8)),
    "finetune": lambda: (model(), sentences(8)),
    "generate": lambda: (model(), "the cat"),
    "learning.finetune": lambda: (model(), sentences(8)),
    "learning.in_context": lambda: (model(), PAIRS),
    "learning.learn": lambda: (model(), [ll.learning.Demonstration((7, 8))], 0.1),
    "load": lambda: (model().model,),
    "patch": lambda: (model(), "the cat", "the dog"),
    "patchscope": lambda: (model(), "the cat"),
    "search": lambda: (model(), "cat"),
    "stats.Moments": lambda: (3, 4),
    "stats.collect": lambda: (model(), sentences(8)),
    "steering_cost": lambda: (model(), direction()),
    "tasks.Task": lambda: ("task", ()),
    "tasks.encode": lambda: (model(), ll.tasks.load(PAIRS)),
    "tasks.load": lambda: (PAIRS,),
    "weights": lambda: (model(),),
}


def public() -> Iterator[tuple[str, Any]]:
    """Every public function, class and method, by name."""
    yield "read", read
    for name in set(ll.__all__) - {*NAMESPACES, "read"}:
        yield name, getattr(ll, name)
    for space in NAMESPACES:
        module = getattr(ll, space)
        for name in getattr(module, "__all__", [n for n in vars(module) if n[0] != "_"]):
            yield f"{space}.{name}", getattr(module, name)
    for owner in CLASSES:
        for name, method in inspect.getmembers(getattr(ll, owner), inspect.isroutine):
            if not name.startswith("_"):
                yield f"{owner}.{name}", method


def literals(annotation: Any) -> list[Any]:
    """The `Literal`s in an annotation, however deep."""
    if typing.get_origin(annotation) is Literal:
        return [annotation]
    return [found for inside in typing.get_args(annotation) for found in literals(inside)]


@cache
def choices() -> list[tuple[str, str, tuple[str, ...]]]:
    """Every function and parameter that takes a choice, and the choices."""
    found = []
    for name, function in public():
        if not callable(function) or name in RESULTS:
            continue
        typed = function.__init__ if isinstance(function, type) else function
        for parameter, annotation in _hints(typed).items():
            if parameter != "return" and (inside := literals(annotation)):
                found.append((name, parameter, typing.get_args(inside[0])))
    return sorted(found)


def _hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, localns={"Transformer": Transformer})
    except (NameError, TypeError):  # names that only type checkers see; built-ins
        return {}


def test_the_public_choices_are_found():
    found = {f"{name}({parameter})" for name, parameter, _ in choices()}
    assert {"evaluate(side)", "Sampling(unit)", "generate(policy)", "exits.split(by)"} <= found
    assert {name for name, _, _ in choices()} == set(ARGUMENTS)


@pytest.mark.parametrize(("name", "parameter", "known"), choices(), ids=str)
def test_a_wrong_choice_is_refused_with_those_that_exist(name, parameter, known):
    function = dict(public())[name]
    wrong = f"{known[0]}s"
    value = (wrong,) if parameter == "drafts" else wrong
    with pytest.raises(BadSettings) as caught:
        function(*ARGUMENTS[name](), **{parameter: value})
    message = str(caught.value)
    assert repr(wrong) in message
    assert all(repr(choice) in message for choice in known)
    assert "\n" not in message


@pytest.mark.parametrize("value", [None, 3, ["fit"], "FIT ", ""])
def test_only_the_choices_themselves_are_accepted(value):
    with pytest.raises(BadSettings, match=r"side is .*; expected one of 'fit', 'both'"):
        check_choice(value, Literal["fit", "both"], "side")
    check_choice("fit", Literal["fit", "both"], "side")
    check_choice("both", ("fit", "both"), "side")


def test_the_nearest_choice_is_named():
    with pytest.raises(BadSettings, match="did you mean 'held-out'"):
        check_choice("HeldOut", ("fit", "held-out"), "side")
