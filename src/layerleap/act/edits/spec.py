"""Edits as short strings, for calls, command lines and links, and as sentences.

In: a string such as "L12.N34=5@last". Out: the edit; and back. Wherever edits are taken, such a
string may stand for one.

How an edit is written is told, and read, in `act.spelling`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from layerleap.act.edits.heads import NEUTRAL, HeadEdit, MeanHead, ScaleHead, SetHead, ZeroHead
from layerleap.act.edits.neurons import AddNeuron, NeuronEdit, ScaleNeuron, SetNeuron, ZeroNeuron
from layerleap.act.edits.sites import ScaleSite, ZeroSite
from layerleap.act.edits.vectors import AddVector
from layerleap.act.spelling import PLACES, read_edit
from layerleap.act.steering.saved import Direction
from layerleap.errors import BadSettings
from layerleap.models.hooks.edit import Edit
from layerleap.models.hooks.rows import Positions

Edits = Edit | str | Sequence[Edit | str]  # what a user may give as edits


def as_edits(given: Edits | Iterable[Edit | str]) -> tuple[Edit, ...]:
    """The edits, of which each may be written as a string; one alone needs no list."""
    edits = [given] if isinstance(given, Edit | str) else given
    return tuple(edit if isinstance(edit, Edit) else parse_edit(edit) for edit in edits)


def parse_edit(spec: str) -> Edit:
    """The edit that a string describes.

    ll.edits.parse_edit("L12.N34=5@last")
    """
    typed = read_edit(spec)
    at: dict[str, Any] = {"positions": typed.positions}
    if typed.kind == "state":
        return AddVector(typed.block, Direction.load(typed.name), typed.value, **at)
    is_off = typed.change == "off" or (typed.change == "set" and typed.kind != "neuron")
    if typed.kind == "site":
        off_site, scaled_site = ZeroSite(typed.block, typed.name, **at), ScaleSite
        return off_site if is_off else scaled_site(typed.block, typed.name, typed.value, **at)
    place = typed.block, typed.name
    if typed.kind == "head":
        if typed.change == "mean":
            return MeanHead(*place, **at)
        return ZeroHead(*place, **at) if is_off else ScaleHead(*place, typed.value, **at)
    if is_off:
        return ZeroNeuron(*place, **at)
    kinds: dict[str, Any] = {"set": SetNeuron, "scale": ScaleNeuron, "add": AddNeuron}
    edit: Edit = kinds[typed.change](*place, typed.value, **at)
    return edit


def edit_spec(edit: Edit) -> str:
    """The string that `parse_edit` reads as this edit."""
    if (place := _place(edit)) is None:
        raise BadSettings(
            f"{edit!r} is not an edit of a neuron, a head, a part of a block or along a saved "
            "direction, so it cannot be written as text"
        )
    where = edit.positions  # type: ignore[attr-defined]  # all of these have positions
    return place + _operation(edit) + ("" if where == "all" else f"@{_listed(where, ',')}")


def edit_sentence(edit: Edit) -> str:
    """The edit in words."""
    words = _action(edit, _name(edit))
    positions: Positions = edit.positions  # type: ignore[attr-defined]
    if isinstance(positions, str):
        return words + PLACES[positions]
    noun = "position" if len(positions) == 1 else "positions"
    return f"{words} at {noun} {_listed(positions, ', ')}"


def _name(edit: Edit) -> str:
    if isinstance(edit, NeuronEdit):
        return f"neuron {edit.neuron} of block {edit.block}"
    if isinstance(edit, HeadEdit):
        return f"head {edit.head} of block {edit.block}"
    if isinstance(edit, ScaleSite | ZeroSite):
        return f"{edit.site} of block {edit.block}"
    if isinstance(edit, AddVector):
        return f"h[{edit.layer}]"
    raise BadSettings(f"{edit!r} is not an edit of a neuron, head, part or state")


def _action(edit: Edit, name: str) -> str:
    if isinstance(edit, SetNeuron):
        return f"Set {name} to {edit.value:g}"
    if isinstance(edit, ScaleNeuron | ScaleHead | ScaleSite):
        return f"Multiply {name} by {edit.factor:g}"
    if isinstance(edit, AddNeuron):
        return f"Add {edit.amount:g} to {name}"
    if isinstance(edit, AddVector):
        file = edit.vector.source if isinstance(edit.vector, Direction) else ""
        return f"Add {edit.factor:g} times {file or 'a vector'} to {name}"
    if isinstance(edit, MeanHead | SetHead):
        return f"Set {name} to {'its mean' if isinstance(edit, MeanHead) else 'a vector'}"
    return f"Switch off {name}"


def describe(edit: Edit) -> dict[str, str | None]:
    """The string of an edit, if it has one, and the edit in words."""
    if _place(edit) is None:
        return {"spec": None, "sentence": repr(edit)}
    return {"spec": edit_spec(edit), "sentence": edit_sentence(edit)}


def _place(edit: Edit) -> str | None:
    """The part of the string that says where; None for an edit that has no string."""
    if isinstance(edit, NeuronEdit):
        return f"L{edit.block}.N{edit.neuron}"
    if isinstance(edit, ZeroHead | ScaleHead) or (
        isinstance(edit, MeanHead) and edit.over is NEUTRAL
    ):
        return f"L{edit.block}.H{edit.head}"
    if isinstance(edit, ScaleSite | ZeroSite):
        return f"L{edit.block}.{edit.site}"
    is_saved = isinstance(edit, AddVector) and isinstance(edit.vector, Direction)
    if is_saved and edit.vector.source and edit.unit == "vector":  # type: ignore[attr-defined]
        return f"h{edit.layer}"  # type: ignore[attr-defined]
    return None


def _operation(edit: Edit) -> str:
    """The change, with as many digits as it takes to read the same number back."""
    if isinstance(edit, SetNeuron):
        return f"={_number(edit.value)}"
    if isinstance(edit, ScaleNeuron | ScaleHead | ScaleSite):
        return f"*{_number(edit.factor)}"
    if isinstance(edit, AddNeuron):
        return f"-{_number(-edit.amount)}" if edit.amount < 0 else f"+{_number(edit.amount)}"
    if isinstance(edit, AddVector) and isinstance(edit.vector, Direction):
        return f"{'-' if edit.factor < 0 else '+'}{edit.vector.source}*{_number(abs(edit.factor))}"
    return "=mean" if isinstance(edit, MeanHead) else "=off"


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _listed(positions: Positions, comma: str) -> str:
    return positions if isinstance(positions, str) else comma.join(map(str, positions))
