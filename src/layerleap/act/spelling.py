"""Edits, exit rules and lists of layers as they are typed, read without a model and without torch.

In: what was typed. Out: plain values, from which edits and rules are made; or an error in one line,
before anything slow is loaded.

    L12.N34=5       set the coefficient of neuron 34 of block 12 to 5
    L12.N34*-1      multiply it by -1
    L12.N34+3       add 3; L12.N34-3 subtracts 3
    L12.N34=off     switch the neuron off; L12.N34=0 sets it to 0, which is the same
    L12.H3=0        switch head 3 of block 12 off; also *0.5, and =mean
    L12.attn=0      switch off what attention of block 12 adds; also ffn, *0.5, and attn.out
    h15+FILE*2      add 2 times the direction in a file to h[15]; - subtracts it
    ...@last        at the last position only; also @all (the default), @generated, @0,3,5

    similarity:0.95, patience:3, never ...      an exit rule and its number
"""

import math
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from layerleap.errors import BadArtifact, BadSettings, did_you_mean
from layerleap.files import read_json

Policy = Literal["recompute", "propagate", "shortcut"]
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
AT = r"\s*(?:@\s*(?P<positions>[a-z]+|\d{1,9}(?:\s*,\s*\d{1,9})*))?"
PART = re.compile(
    r"L(?P<block>\d{1,9})(?:\.?N(?P<neuron>\d{1,9})|\.?H(?P<head>\d{1,9})|\.(?P<site>[a-z_]+(?:\.(?:in|out))?))"
    rf"\s*(?P<sign>[=*+-])\s*(?P<value>{NUMBER}|off|mean){AT}",
    re.IGNORECASE,
)
STATE = re.compile(
    rf"h(?P<layer>\d{{1,9}})\s*(?P<sign>[+-])\s*(?P<file>[^*@]+?)\s*(?:\*\s*(?P<value>{NUMBER}))?{AT}",
    re.IGNORECASE,
)
LONGEST = 1000  # characters of an edit
PLACES = {"all": "", "last": " at the last position", "generated": " at generated positions"}


class TypedEdit(NamedTuple):
    """An edit as it was typed."""

    kind: Literal["neuron", "head", "site", "state"]
    block: int  # or the layer, of a state
    name: Any  # the number of a neuron or head, a site, or the file of a direction
    change: Literal["set", "scale", "add", "off", "mean"]
    value: float
    positions: Any  # a name or a tuple of numbers


def read_edit(spec: str) -> TypedEdit:
    """What a string such as "L12.N34=5@last" says."""
    if not isinstance(spec, str):
        raise BadSettings(
            f"{spec!r:.80} is not an edit; expected a string such as 'L12.N34=5' or a value such "
            "as ll.edits.ZeroNeuron(block=1, neuron=0)"
        )
    text = spec.strip() if len(spec) < LONGEST else ""
    if (state := STATE.fullmatch(text)) is not None:
        number = _number(spec, state["value"] or "1")
        number = number if state["sign"] == "+" else -number
        positions = _positions(spec, state["positions"])
        return TypedEdit("state", int(state["layer"]), state["file"], "add", number, positions)
    match = PART.fullmatch(text)
    if match is None:
        raise BadSettings(
            f"cannot read the edit {spec[:LONGEST]!r}; expected a block, a neuron and a change, as "
            "in L12.N34=5, L12.N34*0.5, L12.N34+3 or L12.N34=off, and positions if not all, as in "
            "L12.N34=5@last; or a head (L12.H3=0), a part of a block (L12.attn=0), or a layer and "
            "a saved direction (h15+direction.safetensors*2)"
        )
    kind: Any = next(kind for kind in ("neuron", "head", "site") if match[kind] is not None)
    name = match[kind].lower() if kind == "site" else int(match[kind])
    place = kind, int(match["block"]), name
    positions = _positions(spec, match["positions"])
    sign, value = match["sign"], match["value"].lower()
    if value in ("off", "mean"):
        if sign != "=":
            raise BadSettings(f"cannot read the edit {spec!r}; expected ={value}")
        if value == "mean" and kind != "head":
            raise BadSettings(f"cannot read the edit {spec!r}; only a head is set to its mean")
        return TypedEdit(*place, value, 0.0, positions)  # type: ignore[arg-type]
    number = _number(spec, value)
    if kind != "neuron" and (sign in "+-" or (sign == "=" and number != 0)):
        raise BadSettings(
            f"cannot read the edit {spec!r}; a {kind} is switched off by =0 or multiplied, as in *2"
        )
    if sign in "=*":
        return TypedEdit(*place, "set" if sign == "=" else "scale", number, positions)
    return TypedEdit(*place, "add", number if sign == "+" else -number, positions)


def _number(spec: str, text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadSettings(f"the number in the edit {spec!r} is too large")
    return number


def _positions(spec: str, text: str | None) -> Any:
    if text is None:
        return "all"
    if text[0].isdigit():
        return tuple(int(number) for number in text.split(","))
    name = next((name for name in PLACES if name == text.lower()), None)
    if name is None:
        raise BadSettings(
            f"unknown positions {text!r} in the edit {spec!r}; expected {', '.join(PLACES)}, or "
            "numbers as in @0,3"
        )
    return name


class Knob(NamedTuple):
    """The number that a rule is given."""

    field: str
    expected: str  # in words
    least: float = -math.inf
    most: float = math.inf
    is_integer: bool = False
    example: str = ""

    def check(self, rule: str, value: Any) -> None:
        """Refuse a number that the rule cannot have."""
        is_valid = is_number(value) and self.least <= value <= self.most
        if not is_valid or (self.is_integer and not isinstance(value, int)):
            raise BadSettings(f"rule {rule!r} got {self.field} {value!r}; expected {self.expected}")


PROBABILITY = "a probability from 0 to 1"
KNOBS = {
    "fixed": Knob(
        "layer",
        "a layer from 1 on (at layer 0 nothing has been computed)",
        1,
        is_integer=True,
        example="20",
    ),
    "gap": Knob("lam", "any finite number", example="0.8"),
    "top-probability": Knob("threshold", PROBABILITY, 0, 1, example="0.9"),
    "entropy": Knob("threshold", "an entropy in nats, 0 or more", 0, example="0.5"),
    "similarity": Knob("threshold", "a cosine from -1 to 1", -1, 1, example="0.98"),
    "task": Knob("threshold", PROBABILITY, 0, 1, example="0.9"),
    "patience": Knob("k", "a number of layers from 1 on", 1, is_integer=True, example="3"),
}
TYPED = (*(name for name in KNOBS if name != "task"), "never")  # "task" needs its probe


def read_rule(text: str) -> dict[str, Any]:
    """The rule that was typed as "name:number", for `rule_from_dict`."""
    name, _, number = text.partition(":")
    if name not in TYPED:
        raise BadSettings(
            f"unknown rule {name!r}; expected one of: {', '.join(TYPED)}{did_you_mean(name, TYPED)}"
        )
    if name not in KNOBS:
        return {"name": name}
    knob = KNOBS[name]
    try:
        value = int(number) if knob.is_integer else float(number)
    except ValueError as error:
        raise BadSettings(
            f"rule {name!r} needs a number after a colon, as in {name}:{knob.example}"
        ) from error
    knob.check(name, value)
    more = {"length": 30.0} if name == "gap" else {}
    return {"name": name, knob.field: value, **more}


def read_plan(path: str | Path) -> dict[str, Any]:
    """The content of the file of an exit plan."""
    data = read_json(Path(path))
    if not isinstance(data, dict) or not {"rule", "layers", "bank"} <= data.keys():
        raise BadArtifact(
            f"{path} is not an exit plan: expected the keys rule, layers and bank, as written by "
            "`layerleap study suitability`"
        )
    return data


def read_layers(text: str, option: str = "--checks") -> list[int]:
    """Layers separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise BadSettings(
            f"{option} {text!r} is not a list of layers; expected numbers separated by commas, "
            "such as 20,24,28"
        ) from error


def is_number(value: Any) -> bool:
    """True for a finite number that is not a truth value."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)
