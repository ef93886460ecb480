"""Random inputs for discovery."""

import torch

from families import build
from layerleap.models.discovery.probe import probe_ids
from layerleap.models.transformer import Transformer
from layerleap.models.weights import kinds, refusals, vectors


def few_known(known: list[int]) -> torch.nn.Module:
    model = build("llama")
    with torch.no_grad():
        kept = model.model.embed_tokens.weight[known].clone()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[known] = kept
    return model


def test_tokens_with_an_embedding_of_zero_are_avoided():
    known = [2, 7, 19, 40]
    ids = probe_ids(few_known(known), 3, 9, 0)
    assert ids.shape == (3, 9)
    assert set(ids.flatten().tolist()) == {7, 19, 40}  # the first few ids may be padding


def test_other_models_are_probed_as_before_and_an_empty_table_is_no_error():
    expected = torch.randint(5, 61, (2, 7), generator=torch.Generator().manual_seed(3))
    assert torch.equal(probe_ids(build("llama"), 2, 7, 3), expected)
    assert torch.equal(probe_ids(few_known([]), 2, 7, 3), expected)


def test_all_weights_of_a_model_that_knows_few_tokens_are_verified():
    model = Transformer.wrap(few_known([7, 19, 40]))
    assert kinds(model, 1) == kinds(Transformer.wrap(build("llama")), 1)
    assert refusals(model, 2) == ()
    gate = model.model.model.layers[1].mlp.gate_proj.weight
    assert torch.equal(vectors(model, 2, "ffn.gate"), gate)
