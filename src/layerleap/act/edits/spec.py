"""Edits of neurons as short strings, for command lines and links, and as sentences.

In: a string such as "L12.N34=5@last". Out: the edit; and back.

    L12.N34=5       set the coefficient of neuron 34 of block 12 to 5
    L12.N34*-1      multiply it by -1
    L12.N34+3       add 3; L12.N34-3 subtracts 3
    L12.N34=off     switch the neuron off
    ...@last        at the last position only; also @all (the default), @generated, @0,3,5
"""

import math
import re
from typing import Any

from layerleap.act.edits.neurons import AddNeuron, NeuronEdit, ScaleNeuron, SetNeuron, ZeroNeuron
from layerleap.errors import BadSettings
from layerleap.models.hooks.edit import Edit
from layerleap.models.hooks.rows import NAMED, Positions

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
PATTERN = re.compile(
    rf"L(?P<block>\d{{1,9}})\.?N(?P<neuron>\d{{1,9}})\s*(?:(?P<sign>[=*+-])\s*(?P<value>{NUMBER}|off))"
    r"\s*(?:@\s*(?P<positions>[a-z]+|\d{1,9}(?:\s*,\s*\d{1,9})*))?",
    re.IGNORECASE,
)
LONGEST = 1000  # characters of an edit
PLACES = {"all": "", "last": " at the last position", "generated": " at generated positions"}


def parse_edit(spec: str) -> NeuronEdit:
    """The edit that a string describes.

    ll.edits.parse_edit("L12.N34=5@last")
    """
    if not isinstance(spec, str):
        raise BadSettings(f"{spec!r} is not a string; expected an edit such as 'L12.N34=5'")
    match = PATTERN.fullmatch(spec.strip()) if len(spec) < LONGEST else None
    if match is None:
        raise BadSettings(
            f"cannot read the edit {spec[:LONGEST]!r}; expected a block, a neuron and a change, as "
            "in L12.N34=5, L12.N34*0.5, L12.N34+3 or L12.N34=off, and positions if not all, as in "
            "L12.N34=5@last"
        )
    place: dict[str, Any] = {
        "block": int(match["block"]), "neuron": int(match["neuron"]),
        "positions": _positions(spec, match["positions"]),
    }  # fmt: skip
    sign, value = match["sign"], match["value"].lower()
    if value == "off":
        if sign != "=":
            raise BadSettings(f"cannot read the edit {spec!r}; a neuron is switched off by =off")
        return ZeroNeuron(**place)
    number = float(value)
    if not math.isfinite(number):
        raise BadSettings(f"the number in the edit {spec!r} is too large")
    if sign == "=":
        return SetNeuron(value=number, **place)
    if sign == "*":
        return ScaleNeuron(factor=number, **place)
    return AddNeuron(amount=number if sign == "+" else -number, **place)


def edit_spec(edit: Edit) -> str:
    """The string that `parse_edit` reads as this edit."""
    edit = _neuron_edit(edit)
    places = "" if edit.positions == "all" else f"@{_listed(edit.positions, ',')}"
    return f"L{edit.block}.N{edit.neuron}{_operation(edit)}{places}"


def edit_sentence(edit: Edit) -> str:
    """The edit in words."""
    edit = _neuron_edit(edit)
    name = f"neuron {edit.neuron} of block {edit.block}"
    if isinstance(edit, SetNeuron):
        words = f"Set {name} to {edit.value:g}"
    elif isinstance(edit, ScaleNeuron):
        words = f"Multiply {name} by {edit.factor:g}"
    elif isinstance(edit, AddNeuron):
        words = f"Add {edit.amount:g} to {name}"
    else:
        words = f"Switch off {name}"
    if isinstance(edit.positions, str):
        return words + PLACES[edit.positions]
    noun = "position" if len(edit.positions) == 1 else "positions"
    return f"{words} at {noun} {_listed(edit.positions, ', ')}"


def describe(edit: Edit) -> dict[str, str | None]:
    """The string of an edit, if it has one, and the edit in words."""
    if not isinstance(edit, NeuronEdit):
        return {"spec": None, "sentence": repr(edit)}
    return {"spec": edit_spec(edit), "sentence": edit_sentence(edit)}


def _operation(edit: NeuronEdit) -> str:
    """The change, with as many digits as it takes to read the same number back."""
    if isinstance(edit, SetNeuron):
        return f"={_number(edit.value)}"
    if isinstance(edit, ScaleNeuron):
        return f"*{_number(edit.factor)}"
    if isinstance(edit, AddNeuron):
        return f"-{_number(-edit.amount)}" if edit.amount < 0 else f"+{_number(edit.amount)}"
    return "=off"


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _neuron_edit(edit: Edit) -> NeuronEdit:
    if not isinstance(edit, NeuronEdit):
        raise BadSettings(f"{edit!r} is not an edit of a neuron, so it cannot be written as text")
    return edit


def _positions(spec: str, text: str | None) -> Positions:
    if text is None:
        return "all"
    if text[0].isdigit():
        return tuple(int(number) for number in text.split(","))
    name = next((name for name in NAMED if name == text.lower()), None)
    if name is None:
        raise BadSettings(
            f"unknown positions {text!r} in the edit {spec!r}; expected {', '.join(NAMED)}, or "
            "numbers as in @0,3"
        )
    return name  # type: ignore[return-value]  # one of the literals


def _listed(positions: Positions, comma: str) -> str:
    return positions if isinstance(positions, str) else comma.join(map(str, positions))
