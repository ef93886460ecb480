"""Weights that change after a model was wrapped: what was fitted on the old ones is refused."""

import pytest
import torch

import layerleap as ll
from families import build
from layerleap.act.debug.debugger import Debugger
from layerleap.act.decode.pass_cost import PassCost
from layerleap.errors import WrongModel
from layerleap.lens.lens import Lens
from layerleap.models.changes import mark
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward, unembedding
from tiny_models import sentences, tiny, tokenizer

TEXT = "the cat sat on the mat and"


@pytest.fixture(scope="module")
def bank():
    model = tiny()
    return ll.fit(model, sentences(60), ridge=0.1, evaluate=False, progress=False)


def in_place(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] += 1


def through_data(model):
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)


def by_an_optimizer(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([[7, 8, 9]]), labels=torch.tensor([[7, 8, 9]])).loss.backward()
    optimizer.step()


def by_loading(model):
    model.load_state_dict(build("llama", 1).state_dict())


def by_assigning(model):
    model.load_state_dict(build("llama", 1).state_dict(), assign=True)


def by_replacing(model):
    model.model.layers[1].mlp = build("llama", 1).model.layers[1].mlp


CHANGES = [in_place, through_data, by_an_optimizer, by_loading, by_assigning, by_replacing]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_bank_and_its_lens_are_refused_once_the_weights_were_changed(bank, change):
    model = tiny()
    lens = bank.lens(model)
    decoder = ll.decoder(bank, transformer=model, packed=False, cost=PassCost((1,), (1.0,)))
    lens.read(TEXT)
    ids = torch.tensor([[7, 8, 9]])
    model.model.generate(ids, max_new_tokens=2, custom_generate=decoder)
    change(model.model)
    uses = [
        lambda: lens.read(TEXT),
        lambda: bank.lens(model),
        lambda: ll.read(model, TEXT, bank=bank),
        lambda: ll.evaluate(model, bank, sentences(9), progress=False),
        lambda: ll.generate(model, TEXT, bank=bank, max_new_tokens=2),
        lambda: model.model.generate(ids, max_new_tokens=2, custom_generate=decoder),
    ]
    for use in uses:
        with pytest.raises(WrongModel, match="changed since it was loaded"):
            use()


@pytest.mark.parametrize("place", ["row", "column"])
def test_a_neuron_or_a_token_set_to_zero_through_data_is_noticed(bank, place):
    shape = tiny().model.model.layers[0].mlp.down_proj.weight.shape
    for index in range(shape[0 if place == "row" else 1]):
        model = tiny()
        weight = model.model.model.layers[0].mlp.down_proj.weight.data
        (weight if place == "row" else weight.T)[index] = 0
        with pytest.raises(WrongModel):
            bank.lens(model)


def test_a_change_that_no_mark_shows_is_found_by_an_evaluation(bank):
    model = tiny()
    before, weight = mark(model.model), model.model.model.layers[0].mlp.down_proj.weight
    weight.data[1, 2] += 1  # PyTorch counts no writing to .data, and few values are sampled
    assert mark(model.model) == before, "then a test of another entry is needed"
    with pytest.raises(WrongModel):
        ll.evaluate(model, bank, sentences(9), progress=False)


def test_a_model_that_is_moved_or_was_not_touched_keeps_its_bank(bank):
    model = tiny()
    fingerprint = model.identity.fingerprint
    model.model._apply(torch.clone)  # other memory and other versions, as after a move
    bank.lens(model).read(TEXT)
    assert model.identity.fingerprint == fingerprint
    assert not model.is_changed


def test_a_cast_to_bfloat16_keeps_the_bank_and_renews_the_identity(bank):
    model = tiny()
    model.model.to(torch.bfloat16)
    bank.lens(model).read(TEXT)
    assert model.identity.dtype == "bfloat16"


def test_weights_made_under_inference_mode_are_watched_too(bank):
    model = tiny()
    with torch.inference_mode():
        model.model.model.norm.weight = torch.nn.Parameter(torch.full((model.d_model,), 2.0))
    with pytest.raises(WrongModel):
        bank.lens(model)


def test_what_was_found_in_old_weights_is_found_again_in_new_ones():
    model = Transformer.wrap(build("bert", 0), tokenizer("masked-token"))
    before = unembedding(model).clone()  # of a head with two matrices, so a product that is kept
    with torch.no_grad():
        model.model.cls.predictions.transform.dense.weight.mul_(2)
    assert torch.allclose(unembedding(model), 2 * before)


def test_neurons_are_verified_again_after_a_change(monkeypatch):
    model = tiny()
    first = feed_forward(model, 1)
    assert feed_forward(model, 1) is first
    in_place(model.model)
    ll.neurons(model)
    assert feed_forward(model, 1) is not first


def test_the_debugger_records_a_prompt_again_after_a_change():
    model = tiny()
    debugger = Debugger(model)
    before = debugger.cell(TEXT, block=1, position=2)
    in_place(model.model)
    assert debugger.cell(TEXT, block=1, position=2) != before


def test_a_lens_without_a_bank_reads_the_weights_as_they_are():
    model = tiny()
    lens = Lens(model)
    before = lens.read(TEXT).to_dict()
    in_place(model.model)
    after = lens.read(TEXT).to_dict()
    assert after != before
    assert after == Lens(model).read(TEXT).to_dict()
