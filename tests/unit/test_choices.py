"""A mistyped choice is an error that lists the choices, never another choice in disguise."""

import pytest
import torch

import layerleap as ll
from contract_bank import bank_of
from layerleap.errors import BadSettings
from layerleap.lens.probes.cells import folds_of
from layerleap.lens.probes.scores import held_out, score_probe
from layerleap.lens.probes.task import TaskProbe
from layerleap.maps.map_settings import Tuning
from layerleap.stats import Moments, collect
from made_saturation import Knowing, saturation
from tiny_models import sentences, tiny

TEXTS = sentences(20)


def evaluate(**choice: str) -> object:
    model = tiny("llama")
    return ll.evaluate(model, bank_of(model), TEXTS, ll.Sampling(unit="document"), **choice)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: evaluate(side="heldout"),
            "side is 'heldout'; expected .*'fit', 'held-out', 'both'",
        ),
        (lambda: collect(tiny("llama"), TEXTS, pairs="last"), "pairs is 'last'; expected"),
        (lambda: collect(tiny("llama"), TEXTS, parts=["mlp"]), "'mlp'; expected one of 'attn'"),
        (lambda: Moments(3, 8, "every"), "pairs is 'every'; expected .*'final', 'all', 'parts'"),
        (
            lambda: ll.fit(tiny("llama"), TEXTS, ridge="best"),
            "ridge 'best' .* 'auto' or a number",
        ),
        (lambda: Tuning(start="zero"), "start is 'zero'; expected .*'linear', 'logit'"),
        (
            lambda: folds_of(torch.arange(9), (9, 2), 3, "layer", 0),
            "by is 'layer'; expected .*'document', 'row', 'cell'",
        ),
        (
            lambda: held_out(saturation(300), Knowing(saturation(300)), space="row"),
            "space is 'row'; expected .*'raw', 'unit'",
        ),
        (
            lambda: score_probe(saturation(300), Knowing(saturation(300)), space="row"),
            "space is 'row'; expected .*'raw', 'unit'",
        ),
        (
            lambda: TaskProbe.fit(saturation(300), Knowing(saturation(300)), space="row"),
            "space is 'row'; expected .*'raw', 'unit'",
        ),
    ],
)
def test_a_wrong_choice_is_refused_and_the_choices_are_listed(call, expected):
    with pytest.raises(BadSettings, match=expected):
        call()
