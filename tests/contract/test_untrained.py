"""Untrained models of every family: the same architecture and the same laws."""

import pytest
import torch

from families import ALL, build
from layerleap.models.discovery.laws import verdicts
from layerleap.models.transformer import Transformer
from layerleap.models.untrained import untrained
from media import hearing, seeing
from tiny_models import tiny


def weights(transformer):
    return dict(transformer.model.named_parameters())


@pytest.mark.parametrize("name", ALL)
def test_the_untrained_model_has_the_same_architecture_and_keeps_every_law(name):
    model = Transformer.wrap(build(name), name=name)
    twin = untrained(model)
    assert not [verdict for verdict in verdicts(twin) if verdict.status == "fails"]
    assert type(twin.model) is type(model.model)
    assert (twin.kind, twin.blocks, twin.d_model, twin.d_vocab) == (
        model.kind,
        model.blocks,
        model.d_model,
        model.d_vocab,
    )
    assert not twin.model.training
    assert {k: v.shape for k, v in weights(twin).items()} == {
        k: v.shape for k, v in weights(model).items()
    }
    assert twin.identity.fingerprint != model.identity.fingerprint
    assert twin.identity.name == f"{name}, untrained (seed 0)"


@pytest.mark.parametrize("name", ["llama", "vit", "whisper"])
def test_the_untrained_model_depends_only_on_the_seed(name):
    model = Transformer.wrap(build(name))
    state = torch.get_rng_state()
    first = untrained(model, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again, other = untrained(model, seed=1), untrained(model, seed=2)
    assert first.identity.fingerprint == again.identity.fingerprint
    assert first.identity.fingerprint != other.identity.fingerprint


def test_the_model_itself_stays_as_it_was():
    model = Transformer.wrap(build("gpt2", resid_pdrop=0.3))
    before = {key: value.clone() for key, value in weights(model).items()}
    config = model.model.config.to_dict()
    twin = untrained(model)
    assert model.model.config.to_dict() == config
    assert twin.model.config is not model.model.config
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())


def test_the_untrained_model_has_the_same_tokenizer_or_processor():
    for model in (tiny("llama"), seeing("dinov2"), hearing()):
        twin = untrained(model)
        assert twin.tokenizer is model.tokenizer
        assert twin.processor is model.processor


def test_the_untrained_model_has_the_same_dtype():
    model = Transformer.wrap(build("llama").to(torch.bfloat16))
    twin = untrained(model)
    assert {value.dtype for value in weights(twin).values()} == {torch.bfloat16}


def test_the_untrained_head_ignores_the_same_inputs():
    model = seeing("dinov2")
    head = untrained(model).model.classifier.weight
    assert head[:, :24].any()
    assert not head[:, 24:].any()
