"""The two doors: names, options and arguments that are refused by name."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    GPTJModel,
    LlamaPreTrainedModel,
    QuantizedCache,
)

import layerleap as ll
from edit_cases import inputs, wrapped
from families import build
from layerleap.act.edits import Pages, TopKAttention
from layerleap.act.topk.interface import HARMLESS, _without_interface, attention_function
from layerleap.act.topk.pages import PagedKeys
from layerleap.act.topk.topk_settings import TopKSettings
from layerleap.errors import BadSettings, ModelRefused


def test_every_setting_has_one_name_of_its_own():
    settings = [
        {"k": 64},
        {"k": 65},
        {"k": 64, "chunk": 512},
        {"k": 64, "recompute": True},
        {"k": (64, 64)},
        {"k": (64, 65)},
        {"k": {1: 64}},
        {"k": {2: 64}},
        {"k": {1: (64, 64)}},
    ]
    names = [ll.topk_attention(**one) for one in settings]
    assert len(set(names)) == len(names)
    assert names[0] == "layerleap-topk-64-1024"
    for one, name in zip(settings, names, strict=True):
        function = AttentionInterface()[name]
        assert ll.topk_attention(**one) == name
        assert AttentionInterface()[name] is function  # asking again changes nothing
        assert name in AttentionMaskInterface._global_mapping  # else masks would be dropped
    assert ll.topk_attention({2: 5, 1: [6]}) == ll.topk_attention({1: (6,), 2: 5})


def test_the_name_works_in_from_pretrained_and_back(tmp_path):
    model, ids = build("llama"), torch.tensor([[5, 9, 7, 5, 9]])
    model.save_pretrained(tmp_path)
    name = ll.topk_attention(2, 2)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    with torch.no_grad():
        clean, ours = model(ids).logits, loaded(ids).logits
        model.set_attn_implementation(name)
        assert torch.equal(model(ids).logits, ours)
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(ids).logits, clean)
    assert not torch.allclose(ours, clean, atol=1e-3)


@pytest.mark.parametrize("door", [ll.topk_attention, TopKAttention])
def test_bad_options_are_refused_in_one_line(door):
    for options, message in (
        ({"k": 0}, "k is 0; expected a whole number of keys, at least 1"),
        ({"k": -3}, "k is -3; expected a whole number"),
        ({"k": True}, "k is True; expected"),
        ({"k": 2.5}, "k is 2.5; expected"),
        ({"k": "64"}, "k is '64'; expected"),
        ({"k": []}, "k is empty; expected one number per head"),
        ({"k": {}}, "k is empty; expected a number for some blocks"),
        ({"k": [3, 0]}, "k is 0; expected"),
        ({"k": {2: 0}}, "k of block 2 is 0; expected a whole number"),
        ({"k": {2: [1, 0.5]}}, "k of block 2 is 0.5; expected"),
        ({"k": {2: "a"}}, "k of block 2 is 'a'; expected"),
        ({"k": {0: 3, 1: 3}}, "k has block 0; expected blocks by number, from 1"),
        ({"k": {True: 3}}, "k has block True; expected blocks by number, from 1"),
        ({"chunk": 0}, "chunk is 0; expected at least 1 query"),
        ({"chunk": 1.5}, "chunk is 1.5; expected a whole number"),
        ({"recompute": 1}, "recompute is 1; expected True or False"),
    ):
        with pytest.raises(BadSettings, match=message) as caught:
            door(**options)
        assert "\n" not in str(caught.value)


def test_blocks_and_heads_that_do_not_exist_are_refused():
    model = wrapped("llama")
    for edit, message in (
        (TopKAttention(blocks=[4]), "block 4 does not exist: this model has blocks 1 to 3"),
        (TopKAttention(k=(1, 2, 3)), "k for 3 heads; this attention has 4"),
    ):
        with pytest.raises(BadSettings, match=message), model.edit(edit), torch.no_grad():
            model.model(**inputs("llama"))
    with pytest.raises(BadSettings, match="blocks has block 3, but k has no number for it"):
        TopKAttention(k={2: 5}, blocks=[2, 3])


def called(**kwargs):
    """Attention of a module that passes these arguments."""
    function = AttentionInterface()[ll.topk_attention(2)]
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 5, 4, generator=generator)
    module = torch.nn.Module()
    return function(module, query, key, value, kwargs.pop("attention_mask", None), **kwargs)[0]


@pytest.mark.parametrize(
    "name", ["cache", "output_attentions", "cu_seq_lens_q", "indices", "block_indices", "alibi"]
)
def test_arguments_that_change_attention_are_refused_by_name(name):
    with pytest.raises(ModelRefused, match=f"Module calls attention with '{name}'"):
        called(**{name: torch.ones(1)})
    assert torch.equal(called(**{name: None}), called())


def test_harmless_arguments_change_nothing():
    plain = called()
    for name in sorted(HARMLESS):
        assert torch.equal(called(**{name: torch.ones(1)}), plain), name


def test_a_window_without_a_mask_is_refused_if_it_would_hide_keys():
    assert torch.equal(called(sliding_window=5), called())
    with pytest.raises(ModelRefused, match="sliding window of 4 keys but was given 5 keys"):
        called(sliding_window=4)


def test_a_window_is_checked_against_all_keys_not_those_of_chosen_pages():
    paged = PagedKeys(Pages(size=2, keep=1))
    function = attention_function(TopKSettings(2), 1, paged)
    query, key, value = (torch.randn(1, 2, n, 4) for n in (1, 9, 9))
    with pytest.raises(ModelRefused, match="window of 5 keys but was given 9"):
        function(torch.nn.Module(), query, key, value, None, sliding_window=5)


def test_a_users_own_class_does_not_make_a_family_refused():
    """A class in a notebook has no source to look into, and is not the family's."""
    own = type("MyLlama", (LlamaPreTrainedModel,), {"__module__": "__main__"})
    own._can_set_attn_implementation = classmethod(lambda cls: False)
    _without_interface.cache_clear()
    assert _without_interface(own.config_class) is None
    assert _without_interface(GPTJModel.config_class) is not None


def test_a_bias_of_another_shape_is_refused_by_its_name():
    with pytest.raises(BadSettings, match="position_bias has shape"):
        called(position_bias=torch.zeros(1, 2, 3, 5))


def test_sinks_of_another_shape_are_refused():
    with pytest.raises(ModelRefused, match=r"'s_aux' of shape \(3,\); expected one number"):
        called(s_aux=torch.zeros(3))


def test_is_causal_of_the_call_decides_before_that_of_the_module():
    whole = called(is_causal=False)
    assert not torch.allclose(whole, called())
    assert torch.equal(called(is_causal=True), called())
    full = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    torch.testing.assert_close(called(attention_mask=full), whole)


def test_k_by_block_needs_modules_that_know_their_block():
    model = build("vit")
    model.set_attn_implementation(ll.topk_attention({1: 3}))
    with pytest.raises(BadSettings, match=r"does not know its block \(layer_idx\)"):
        model(torch.zeros(1, 3, 16, 16))


def test_a_block_that_does_not_exist_is_refused_by_plain_models_too():
    model = build("llama")
    model.set_attn_implementation(ll.topk_attention({1: 3, 7: 3}))
    with pytest.raises(BadSettings, match="block 7, which does not exist: this model has blocks"):
        model(torch.tensor([[5, 9, 7]]))


def test_quantised_caches_are_refused_by_name():
    model = build("llama").eval()
    transformer = ll.Transformer.wrap(model, check=False)
    cache = QuantizedCache("fp8", model.config)
    with (
        transformer.edit(TopKAttention(k=2)),
        pytest.raises(BadSettings, match="QuantizedCache holds quantised keys"),
    ):
        model(torch.tensor([[5, 9, 7]]), past_key_values=cache)


def test_the_edit_is_a_value():
    assert TopKAttention(k=[1, 2]) == TopKAttention(k=(1, 2))
    assert TopKAttention() != TopKAttention(k=63)
    with pytest.raises(AttributeError):
        TopKAttention().k = 3
    assert (
        repr(TopKAttention(k=8))
        == "TopKAttention(k=8, chunk=1024, blocks=None, recompute=False, pages=None)"
    )
