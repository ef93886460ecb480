"""Direct logit attribution: what each part of a model adds to the logit of a token.

In: a wrapped model and a prompt. Out: `Attribution`, whose rows add up to the logit (or to a
difference of logits) up to rounding; with `total=True` also what removing each component does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.attribution.contributions import By, Component, Contributions, Places
from layerleap.lens.attribution.prompt import OneInput
from layerleap.lens.attribution.readout import Readout
from layerleap.lens.attribution.removal import Removal
from layerleap.lens.attribution.result import Attribution
from layerleap.lens.attribution.target import Target, spaced
from layerleap.lens.lens import Lens
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import find_bank
from layerleap.models.discovery.compare import ROUNDING, rounding
from layerleap.models.facts import check_number
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, reporting

CAPPED = "the score is before the model's soft-cap of logits, which is not linear"


@checked
def attribute(
    transformer: Transformer,
    prompt: Any,
    token: str | int | None = None,
    against: str | int | Sequence[str | int] | None = None,
    position: int | None = None,
    by: By = "part",
    *,
    layer: int | None = None,
    bank: ShortcutBank | str | Path | None = None,
    other_model: bool = False,
    top: int = 20,
    total: bool = False,
    text: Any = None,
    n_texts: int = 64,
    progress: Progress | bool = True,
) -> Attribution:
    """What each part of a model adds to the logit of a token: rows that add up to the logit.

        ll.attribute(model, "The capital of France is")
        ll.attribute(model, "The capital of France is", " Paris", against=" London", by="head")
        ll.attribute(model, "The capital of France is", layer=20, bank="default")

    Args:
        prompt: a text, chat messages or token ids; for other models what `model.capture` takes.
        token: a token as it is written in a text, its id, or the name of a class; by default what
            the model (or the lens at `layer`) would say.
        against: a token, or several, whose mean logit is subtracted; "vocabulary" for the mean of
            all logits.
        position: where the logit is read, negative from the end; by default the last position
            that a lens reads: the last token, the last mask, or where a classifier reads.
        by: "part" (attention and FFN of each block), "head", "neuron" (the strongest of all
            blocks), or "source" (head by the position that it takes from).
        layer: attribute what a lens reads at this layer; the model's own logits when None.
        bank: shortcuts to read `layer` through; None is the logit lens.
        other_model: allow a bank of another model of the same class and width, with a warning.
        top: how many neurons have rows of their own.
        total: also remove each component (its mean over `text` is put in its place at this
            position) and run on; takes a pass for every few components.
        text: what means are taken over; the model's default text when None.
        n_texts: how many sentences of it.
        progress: of removing.
    """
    transformer.require_eval()
    last = transformer.n_layers
    if transformer.row_kind == "sequence":
        raise ModelRefused(
            f"{transformer.identity.name} averages normed states of all positions, so a logit is "
            "not a sum over the parts of one state; ll.attention can read this model"
        )
    check_number("layer", last if layer is None else layer, 0, last)
    if bank is not None and layer is None:
        raise BadSettings("a bank reads an inner layer; name one by layer, or leave out bank")
    if top < 0:
        raise BadSettings(f"top is {top}; expected 0 or more")
    if total and by == "source":
        raise BadSettings("total=True removes parts, heads or neurons; expected one of these as by")
    lens = Lens(transformer, find_bank(transformer, bank, other_model=other_model))
    lens.check_model()
    place = last if layer is None else layer
    given = OneInput.of(transformer, prompt, position)
    places = Places(transformer, by, place)
    captured, patterns = Contributions.capture(places, given)
    readout = Readout(lens, place, captured.states[place])
    target = Target.of(transformer, readout.logits, token, against)
    value, gradient, constants = readout.scored(target.weights)
    made = Contributions(places, captured, patterns, gradient)
    rows = [*made.rows(top), *((Component(name), one) for name, one in constants.items())]
    _require_sum(transformer, value, rows, captured.states[place])
    hint = spaced(transformer, token, readout.logits)
    notes = [*lens.caveats(), *places.notes, *([hint] if hint else [])]
    notes += [CAPPED] if readout.is_capped else []
    removed = None
    if total and place:
        removal = Removal(places, [one for one, _ in rows])

        def score(states: Tensor) -> Tensor:
            logits = [Readout(lens, place, state[None]).logits for state in states]
            return torch.stack(logits).double() @ target.weights.double()

        with reporting(progress) as report:
            notes.append(removal.measure(text, n_texts, report))
            effects = removal.effects(given, score, report)
        removed = tuple(effects.get(one) for one, _ in rows)
    return Attribution(
        target.words(transformer),
        by,
        given.tokens,
        given.position,
        place,
        "" if layer is None else lens.name,
        value,
        tuple(rows),
        removed,
        notes,
    )


def _require_sum(
    transformer: Transformer, value: float, rows: Sequence[tuple[Component, float]], state: Tensor
) -> None:
    """Refuse rows that do not add up, as where a hook or an edit changes states between parts."""
    residue = abs(sum(one for _, one in rows) - value)
    size = abs(value) + sum(one * one for _, one in rows) ** 0.5
    # Many norms compute in float32, whatever the model's dtype.
    if residue > 10 * max(rounding(state), ROUNDING[torch.float32]) * size:
        raise ModelRefused(
            f"contributions of {transformer.identity.name} miss the logit by {residue:.2g}, more "
            "than rounding explains: hooks or edits change its states between the parts; remove "
            "them, or attribute an inner layer before they act"
        )
