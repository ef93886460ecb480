"""Models that are put in training mode after they were wrapped."""

import pytest

import layerleap as ll
from layerleap.errors import ModelRefused
from tiny_models import tiny


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt2", {}), ("llama", {"attention_dropout": 0.1}), ("opt", {"dropout": 0.1})],
)
def test_dropout_that_is_on_is_refused_until_the_model_is_in_eval_mode_again(name, changes):
    model = tiny(name, **changes)
    model.require_eval()
    model.model.train()
    with pytest.raises(ModelRefused, match="is in training mode, so its dropout"):
        model.require_eval()
    model.model.eval()
    model.require_eval()


def test_training_mode_without_dropout_is_accepted():
    model = tiny("llama")
    model.model.train()
    model.require_eval()


def test_patching_refuses_dropout():
    model = tiny("gpt2")
    model.model.train()
    with pytest.raises(ModelRefused, match="is in training mode"):
        ll.patch(model, "the cat sat", "the dog ran", metric=ll.metrics.logit_difference(20, 21))
