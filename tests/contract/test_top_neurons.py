"""Laws of sparse FFNs, on every family with neurons."""

import numpy as np
import pytest
import torch

from edit_cases import EXPERTS, inputs, logits, traces, wrapped
from families import MASKED_TOKEN, NEXT_TOKEN, SEQ_TO_SEQ, build
from layerleap.act.edits import SetNeuron, TopKNeurons
from layerleap.act.edits.top_neurons import By
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward, ffn_keys

FAMILIES = [name for name in (*NEXT_TOKEN, *MASKED_TOKEN, *SEQ_TO_SEQ) if name not in EXPERTS]
RULES = By.__args__
RELU = ("opt", "t5")
GATED = ("llama", "gemma2", "phi3", "flan_t5")


def rows_of(name, *edits, block=2):
    """What the down-projection of a block takes: (row, neuron)."""
    model = wrapped(name)
    ffn = feed_forward(model, block)
    if not edits:
        captured = model.capture(inputs(name), layers=(), sites=[(block, ffn.site)])
    else:
        with model.edit(*edits):
            captured = model.capture(inputs(name), layers=(), sites=[(block, ffn.site)])
    return captured.sites[block, ffn.site].reshape(-1, ffn.n_neurons)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_keeping_all_neurons_changes_nothing_bit_for_bit(name):
    model = wrapped(name)
    n = feed_forward(model, 1).n_neurons
    for by in RULES:
        with model.edit(TopKNeurons(n, by), TopKNeurons(10 * n, by, gather=True)):
            assert torch.equal(model.model(**inputs(name)).logits, logits(name))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_kept_coefficients_are_the_largest_and_the_others_are_zero(name):
    model, k = wrapped(name), 5
    before = model.capture(
        inputs(name), layers=(), sites=[(2, feed_forward(model, 2).site)]
    ).sites.popitem()[1]
    before = before.reshape(-1, before.shape[-1])
    lengths = feed_forward(model, 2).written(model).norm(dim=1)
    scores = {"size": before.abs() * lengths, "magnitude": before.abs(), "signed": before}
    for by, score in scores.items():
        after = rows_of(name, TopKNeurons(k, by, blocks=[2]))
        kept = torch.zeros_like(before, dtype=torch.bool)
        kept.scatter_(1, score.topk(k, dim=1).indices, True)
        assert torch.equal(after, before.where(kept, torch.zeros_like(before)))


@pytest.mark.parametrize("name", [n for n in FAMILIES if n in (*RELU, *GATED, "gpt2", "bert")])
@torch.no_grad()
def test_the_papers_rule_ranks_what_enters_the_activation(name):
    model, k = wrapped(name), 6
    keys, before = ffn_keys(model, 2), rows_of(name)
    rows = keys.rows.get("ffn.gate") or keys.rows["ffn.key"]
    taken = model.capture(inputs(name), layers=(), sites=[(2, "ffn.in")]).sites[2, "ffn.in"]
    products = taken.reshape(len(before), -1) @ rows.of(model).T
    if (bias := rows.bias(model)) is not None:
        products = products + bias
    kept = torch.zeros_like(before, dtype=torch.bool)
    kept.scatter_(1, products.topk(k, dim=1).indices, True)
    after = rows_of(name, TopKNeurons(k, "pre-activation", blocks=[2]))
    torch.testing.assert_close(after, before.where(kept, torch.zeros_like(before)))


@torch.no_grad()
def test_with_relu_the_papers_rule_and_that_by_magnitude_keep_the_same():
    for name in RELU:
        by_sign, by_size = (
            rows_of(name, TopKNeurons(7, by)) for by in ("pre-activation", "magnitude")
        )
        torch.testing.assert_close(by_sign, by_size)


@torch.no_grad()
def test_in_a_gated_ffn_the_signed_rules_drop_large_negative_coefficients():
    for name in GATED:
        before = rows_of(name)
        signed = rows_of(name, TopKNeurons(8, "signed", blocks=[2]))
        size = rows_of(name, TopKNeurons(8, "magnitude", blocks=[2]))
        gap = [(before - after).norm() for after in (signed, size)]
        assert gap[0] > 1.3 * gap[1]
        assert (signed >= 0).all()
        assert (size < 0).any()


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "phi3", "falcon"])
@torch.no_grad()
def test_gathered_rows_give_the_same_up_to_rounding(name):
    model = wrapped(name)
    ids = torch.tensor([[5, 9, 33, 7]])
    plain = model.model(ids).past_key_values
    one = {"input_ids": torch.tensor([[12]]), "past_key_values": plain}
    found = []
    for gather in (False, True):
        one["past_key_values"] = model.model(ids).past_key_values
        extra = SetNeuron(2, 3, 1.5)  # not among the kept: gathering must see it, too
        with model.edit(TopKNeurons(6, gather=gather), extra) as report:
            found.append(model.model(**one).logits)
        assert not report.unused
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_generate_with_a_cache_writes_what_it_writes_without_one():
    model = wrapped("llama")
    ids = torch.tensor([[5, 9, 33, 7]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with model.edit(TopKNeurons(6, gather=True)):
        texts = [model.model.generate(ids, use_cache=cache, **options) for cache in (True, False)]
    assert torch.equal(*texts)


@torch.no_grad()
def test_a_row_does_not_depend_on_the_rows_beside_it():
    model = wrapped("llama")
    ids = torch.tensor([[5, 9, 33, 7], [8, 8, 1, 3]])
    with model.edit(TopKNeurons(6)):
        both, alone = model.model(ids).logits, model.model(ids[:1]).logits
    torch.testing.assert_close(both[:1], alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_k_may_differ_by_block_and_other_blocks_stay_as_they_are():
    before = rows_of("llama", block=1)
    after = rows_of("llama", TopKNeurons({2: 4}), block=1)
    assert torch.equal(before, after)
    assert ((rows_of("llama", TopKNeurons({2: 4, 3: 9}), block=2) != 0).sum(1) == 4).all()
    assert ((rows_of("llama", TopKNeurons({2: 4, 3: 9}), block=3) != 0).sum(1) == 9).all()


def test_gradients_flow_through_kept_neurons_alone_also_with_gather():
    model = wrapped("llama")
    down = feed_forward(model, 3).module(model)
    for gather in (False, True):
        down.weight.grad = None
        with model.edit(TopKNeurons(1, blocks=[3], gather=gather)):
            model.model(torch.tensor([[5]])).logits.sum().backward()
        moved = down.weight.grad.abs().sum(0) > 0  # a column per neuron
        assert int(moved.sum()) == 1
    model.model.zero_grad(set_to_none=True)


@torch.no_grad()
def test_nothing_is_left_after_an_error():
    model = wrapped("llama")
    before = traces(model.model)
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="stop"),
        model.edit(TopKNeurons(3, "pre-activation", gather=True)),
    ):
        model.model(**inputs("llama"))
        raise RuntimeError("stop")
    assert traces(model.model) == before
    assert torch.equal(model.model(**inputs("llama")).logits, logits("llama"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k is 0; expected how many neurons to keep"),
        ({"k": 2.5}, "k is 2.5"),
        ({"k": True}, "k is True"),
        ({"k": {}}, "k is given by block"),
        ({"k": {1: 3}, "blocks": [2]}, "blocks left out"),
        ({"k": 3, "by": "sign"}, "by"),
        ({"k": 3, "blocks": 3}, "blocks is 3; expected a list of"),
        ({"k": 3, "gather": "yes"}, "gather is 'yes'; expected"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(BadSettings, match=message):
        TopKNeurons(**settings)


@torch.no_grad()
def test_gathered_rows_are_those_of_the_weights_as_they_are_now():
    model = Transformer.wrap(build("llama").double(), check=False)
    one = torch.tensor([[12]])
    with model.edit(TopKNeurons(np.int64(6), gather=True)):
        before = model.model(one).logits
        model.model.get_submodule("model.layers.1.mlp.down_proj").weight.mul_(3)
        after = model.model(one).logits
    with model.edit(TopKNeurons(6, gather=True)):
        torch.testing.assert_close(after, model.model(one).logits, rtol=0, atol=0)
    assert not torch.allclose(before, after)


def test_blocks_that_do_not_exist_and_experts_are_refused():
    with (
        pytest.raises(BadSettings, match="block 9"),
        wrapped("llama").edit(TopKNeurons(3, blocks=[9])),
    ):
        pass
    with pytest.raises(ModelRefused, match="experts"), wrapped("mixtral").edit(TopKNeurons(3)):
        pass
