"""Neurons of every family: they add up to the stream, and edits of them stay in their cone."""

import pytest
import torch

from edit_cases import EXPERTS, inputs, wrapped
from families import MASKED_TOKEN, NEXT_TOKEN
from layerleap.act.debug.trace import rerun
from layerleap.act.edits import AddNeuron, SetNeuron
from layerleap.errors import ModelRefused
from layerleap.lens.vocabulary.neurons import Neurons
from layerleap.models.hooks.recording import record
from layerleap.models.weights import feed_forward

FAMILIES = [name for name in (*NEXT_TOKEN, *MASKED_TOKEN) if name not in EXPERTS]
CAUSAL = [name for name in NEXT_TOKEN if name not in EXPERTS]
IDS = [5, 9, 33, 7, 12, 40]


@pytest.mark.parametrize("name", FAMILIES)
def test_all_sub_updates_and_the_bias_add_up_to_what_the_ffn_adds_to_the_stream(name):
    model = wrapped(name)
    for block in (1, 3):
        ffn, anatomy = feed_forward(model, block), model.anatomy[block - 1]
        names = {site: key for key, site in anatomy.sites.items()}
        added = names[anatomy.adds[anatomy.parts.index("ffn")]]
        sites = model.capture(
            inputs(name), layers=(), sites=[(block, added), (block, ffn.site)]
        ).sites
        coefficients = sites[block, ffn.site].reshape(-1, ffn.n_neurons)
        values, bias = ffn.values(model), ffn.bias(model)
        shift = torch.zeros(model.d_model).double() if bias is None else bias
        output = coefficients @ values + shift
        parts = coefficients[:, :, None] * values
        total = ffn.into_stream(model, output, parts).sum(1)
        total = total + ffn.into_stream(model, output, shift.expand(len(output), 1, -1))[:, 0]
        total = total + ffn.into_stream_bias(model, output)
        exact = sites[block, added].reshape(total.shape) * ffn.scale
        torch.testing.assert_close(total, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_shares_of_all_neurons_and_the_bias_are_one(name):
    model = wrapped(name)
    for block in Neurons(model).at(IDS, 4, top=10**6):
        assert len(block.updates) == feed_forward(model, block.block).n_neurons
        assert block.shown_share + block.bias_share == pytest.approx(1, abs=1e-6)
        strengths = [update.strength for update in block.updates]
        assert strengths == sorted(strengths, reverse=True)
        strongest = block.updates[0]
        assert strongest.strength == pytest.approx(abs(strongest.coefficient) * strongest.norm)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_are_the_states_around_attention_and_ffn(name):
    """The last stage is what the lens reads at the layer; the middle one differs by the FFN."""
    model = wrapped(name)
    neurons = Neurons(model)
    states = model.capture(torch.tensor([IDS])).states
    for block in neurons.at(IDS, 3):
        for stage, layer in ((block.stages[0], block.block - 1), (block.stages[-1], block.block)):
            probs = neurons.lens.logits(states[layer][0, 3:4], layer)[0].softmax(-1)
            best = stage.top[0]
            assert best.token.id == int(probs.argmax())
            assert best.prob == pytest.approx(float(probs.max()), rel=1e-5)
        is_parallel = model.anatomy[block.block - 1].style == "parallel"
        assert len(block.stages) == (2 if is_parallel else 3)
        assert ("attention" in block.missing) == is_parallel


def test_the_state_after_attention_is_what_the_ffn_adds_to():
    for name in ("llama", "gpt2", "gemma2", "olmo2", "granite"):
        model = wrapped(name)
        neurons = Neurons(model)
        ffn, anatomy = feed_forward(model, 2), model.anatomy[1]
        names = {site: key for key, site in anatomy.sites.items()}
        added = names[anatomy.adds[anatomy.parts.index("ffn")]]
        got = model.capture(torch.tensor([IDS]), layers=[2], sites=[(2, added)])
        middle = got.states[2] - ffn.scale * got.sites[2, added]
        probs = neurons.lens.logits(middle[0, 3:4], 2)[0].softmax(-1)
        stage = neurons.at(IDS, 3, blocks=[2]).blocks[0].stages[1]
        assert stage.where == "attention"
        assert stage.top[0].prob == pytest.approx(float(probs.max()), rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_setting_a_coefficient_to_its_natural_value_keeps_the_logits_bit_for_bit(name):
    model = wrapped(name)
    ids = torch.tensor([IDS])
    plain = model.model(ids).logits
    for block, neuron in ((1, 3), (2, 17), (3, 0)):
        natural = Neurons(model).coefficients(ids, block)[0, 2, neuron]
        with model.edit(SetNeuron(block, neuron, float(natural), positions=[2])) as report:
            assert torch.equal(model.model(ids).logits, plain)
        assert report[0].positions == 1


@pytest.mark.parametrize("name", CAUSAL)
def test_an_edit_changes_nothing_outside_its_causal_cone_bit_for_bit(name):
    model = wrapped(name)
    recording = record(model, torch.tensor([IDS]))
    edited = rerun(recording, [AddNeuron(2, 3, 4.0, positions=[3])])
    assert edited.lowest == 2
    assert set(edited.states) == {2, 3}
    assert not edited.changed[:2].any()
    assert not edited.changed[:, :3].any()
    assert edited.changed[2].tolist() == [False, False, False, True, False, False]
    assert edited.changed[3, 3]


@pytest.mark.parametrize("name", FAMILIES)
def test_running_again_from_the_lowest_edited_block_is_the_edited_pass_bit_for_bit(name):
    model = wrapped(name)
    ids = torch.tensor([IDS])
    edits = [AddNeuron(2, 3, 4.0, positions=[3]), SetNeuron(3, 1, -2.0, positions="last")]
    edited = rerun(record(model, ids), edits)
    with model.edit(*edits):
        whole = model.capture(ids).states
    for layer, state in edited.states.items():
        assert torch.equal(state, whole[layer])


@pytest.mark.parametrize("name", sorted(EXPERTS))
def test_experts_have_stages_but_no_neurons_and_say_why(name):
    model = wrapped(name)
    block = Neurons(model).at(IDS, 3, blocks=[1]).blocks[0]
    assert len(block.stages) >= 2
    assert not block.updates
    assert "mixture of experts" in block.missing["neurons"]
    with pytest.raises(ModelRefused, match="mixture of experts"):
        Neurons(model).values(1)
