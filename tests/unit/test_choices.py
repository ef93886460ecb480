"""A mistyped choice is an error that lists the choices, never another choice in disguise."""

import pytest
import torch
from contract_bank import bank_of
from made_saturation import Knowing, saturation
from tiny_models import sentences, tiny

import layerleap as ll
from layerleap.errors import BadSettings
from layerleap.maps.tuned import Tuning
from layerleap.read.probes.cells import folds_of
from layerleap.read.probes.scores import held_out, score_probe
from layerleap.read.probes.task import TaskProbe
from layerleap.stats import Moments, collect

TEXTS = sentences(20)


def evaluate(**choice: str) -> object:
    model = tiny("llama")
    return ll.evaluate(model, bank_of(model), TEXTS, ll.Sampling(unit="document"), **choice)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: evaluate(side="heldout"), "side 'heldout'; expected one of: held-out, fit, both"),
        (lambda: collect(tiny("llama"), TEXTS, pairs="last"), "pairs 'last'; expected"),
        (lambda: collect(tiny("llama"), TEXTS, parts=["mlp"]), "'mlp'; expected attn"),
        (lambda: Moments(3, 8, "every"), "pairs 'every'; expected one of: final, all, parts"),
        (lambda: ll.fit(tiny("llama"), TEXTS, ridge="best"), "ridge 'best' .* 'auto' or 'gcv'"),
        (lambda: Tuning(start="zero"), "start 'zero'; expected 'mat' or 'identity'"),
        (
            lambda: folds_of(torch.arange(9), (9, 2), 3, "layer", 0),
            "by 'layer'; expected 'document', 'row' or 'cell'",
        ),
        (
            lambda: held_out(saturation(300), Knowing(saturation(300)), space="row"),
            "space 'row'; expected 'raw' or 'unit'",
        ),
        (
            lambda: score_probe(saturation(300), Knowing(saturation(300)), space="row"),
            "space 'row'; expected 'raw' or 'unit'",
        ),
        (
            lambda: TaskProbe.fit(saturation(300), Knowing(saturation(300)), space="row"),
            "space 'row'; expected 'raw' or 'unit'",
        ),
    ],
)
def test_a_wrong_choice_is_refused_and_the_choices_are_listed(call, expected):
    with pytest.raises(BadSettings, match=expected):
        call()
