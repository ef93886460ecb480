"""Edits of neurons as short strings, for calls, command lines and links, and as sentences.

In: a string such as "L12.N34=5@last". Out: the edit; and back. Wherever edits are taken, such a
string may stand for one.

How an edit is written is told, and read, in `act.spelling`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from layerleap.act.edits.neurons import AddNeuron, NeuronEdit, ScaleNeuron, SetNeuron, ZeroNeuron
from layerleap.act.spelling import PLACES, read_edit
from layerleap.errors import BadSettings
from layerleap.models.hooks.edit import Edit
from layerleap.models.hooks.rows import Positions

Edits = Edit | str | Sequence[Edit | str]  # what a user may give as edits


def as_edits(given: Edits | Iterable[Edit | str]) -> tuple[Edit, ...]:
    """The edits, of which each may be written as a string; one alone needs no list."""
    edits = [given] if isinstance(given, Edit | str) else given
    return tuple(edit if isinstance(edit, Edit) else parse_edit(edit) for edit in edits)


def parse_edit(spec: str) -> NeuronEdit:
    """The edit that a string describes.

    ll.edits.parse_edit("L12.N34=5@last")
    """
    typed = read_edit(spec)
    place: dict[str, Any] = {
        "block": typed.block,
        "neuron": typed.neuron,
        "positions": typed.positions,
    }
    if typed.change == "off":
        return ZeroNeuron(**place)
    if typed.change == "set":
        return SetNeuron(value=typed.value, **place)
    if typed.change == "scale":
        return ScaleNeuron(factor=typed.value, **place)
    return AddNeuron(amount=typed.value, **place)


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


def _listed(positions: Positions, comma: str) -> str:
    return positions if isinstance(positions, str) else comma.join(map(str, positions))
