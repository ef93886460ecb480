"""Keys, heads and embeddings of every family: they reproduce the FFN and attention."""

from functools import cache

import pytest
import torch

from edit_cases import EXPERTS, OWN_ATTENTION, inputs, wrapped
from families import MASKED_TOKEN, NEXT_TOKEN, build
from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.facts import READS
from layerleap.models.hooks.attention import attention_wrapped_by
from layerleap.models.hooks.forward import Tap, tapped
from layerleap.models.transformer import Transformer
from layerleap.models.weights import (
    all_heads,
    feed_forward,
    ffn_keys,
    heads,
    kinds,
    refusals,
    vectors,
)
from layerleap.models.weights.norms import fold_of

FAMILIES = [*NEXT_TOKEN, *MASKED_TOKEN]
GATED = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "stablelm",
    "cohere",
    "granite",
}
ROTARY = {
    "gpt_neox",
    "gpt_neox_sequential",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "olmo2",
    "stablelm",
    "cohere",
    "granite",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
}
GROUPED = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "falcon",
    "falcon_new",
    "falcon_alibi",
    "olmo2",
    "cohere",
    "granite",
    "gpt_oss",
    "mixtral",
    "qwen2_moe",
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EXPERTS])
def test_keys_and_activation_give_the_coefficients(name):
    model = wrapped(name)
    for block in (1, 3):
        ffn, keys = feed_forward(model, block), ffn_keys(model, block)
        assert set(keys.rows) == ({"ffn.gate", "ffn.up"} if name in GATED else {"ffn.key"})
        sites = model.capture(inputs(name), layers=(), sites=[(block, "ffn.in"), (block, ffn.site)])
        x = sites.sites[block, "ffn.in"]
        exact = sites.sites[block, ffn.site].reshape(*x.shape[:-1], ffn.n_neurons)
        torch.testing.assert_close(keys.coefficients(model, x), exact)


def test_activations_are_those_of_the_configuration():
    known = {"llama": "silu", "opt": "relu", "gemma": "gelu_pytorch_tanh", "bert": "gelu"}
    assert {name: ffn_keys(wrapped(name), 2).activation for name in known} == known


@cache
def eager(name):
    """A model that can return its attention weights, and those of one pass."""
    model = wrapped(name, attn_implementation="eager")
    with torch.no_grad():
        weights = model.model(**inputs(name), output_attentions=True).attentions
    return model, weights


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_add_up_to_the_output_of_attention(name):
    """Attention weights times x W_V W_O, summed over heads in an explicit loop."""
    model, weights = eager(name)
    for block in (1, 3):
        attention = heads(model, block)
        sites = model.capture(
            inputs(name), layers=(), sites=[(block, "attn.in"), (block, "attn.out")]
        )
        x, exact = sites.sites[block, "attn.in"], sites.sites[block, "attn.out"]
        assert (attention.n_kv_heads < attention.n_heads) == (name in GROUPED)
        bias = attention.values.bias(model)
        total = torch.zeros_like(exact)
        for head in range(attention.n_heads):
            kv = slice(*(attention.d_value * (attention.kv_head(head) + n) for n in (0, 1)))
            values = x @ attention.value(model, head) + (0 if bias is None else bias[kv])
            own = slice(head * attention.d_value, (head + 1) * attention.d_value)
            written = attention.outputs.of(model).T[own]
            total += weights[block - 1][:, head] @ values @ written
        shift = attention.outputs.bias(model)
        total = total if shift is None else total + shift
        torch.testing.assert_close(total, exact)


@cache
def attended(name):
    """Queries and keys of the first pass through each block, as attention sees them."""
    model, seen = wrapped(name), []

    def around(function, module, query, key, *args, **kwargs):
        seen.append((query.clone(), key.clone()))
        return function(module, query, key, *args, **kwargs)

    with attention_wrapped_by(around), torch.no_grad():
        captured = model.capture(
            inputs(name), layers=(), sites=[(block, "attn.in") for block in (1, 2, 3)]
        ).sites
    return seen, captured


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OWN_ATTENTION])
def test_heads_give_the_scores_of_attention_at_an_offset(name):
    """At offset 0, and at offset 2 with the measured rotation."""
    model = wrapped(name)
    seen, captured = attended(name)
    for block in (1, 3):
        attention = heads(model, block)
        assert attention.positions == ("rotary" if name in ROTARY else "none")
        x = captured[block, "attn.in"]
        query, key = seen[block - 1]
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        ours = [each.apply(model, x) for each in (attention.queries, attention.keys)]
        group = attention.n_heads // ours[1].shape[1]
        for offset in (0, 2):
            end = x.shape[1] - offset
            exact = (query[:, :, offset:] * key[:, :, :end]).sum(-1)
            turned = ours[0][:, :, offset:] @ attention.rotation(model, offset)
            made = (turned * ours[1].repeat_interleave(group, 1)[:, :, :end]).sum(-1)
            torch.testing.assert_close(made, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in OWN_ATTENTION])
def test_query_and_key_matrices_are_those_that_are_applied(name):
    """Without a norm, exactly; with one, up to a positive factor per token and head."""
    model = wrapped(name)
    _, captured = attended(name)
    attention, x = heads(model, 2), captured[2, "attn.in"]
    for head in range(attention.n_heads):
        for matrix, projection, place in (
            (attention.query(model, head), attention.queries, head),
            (attention.key(model, head), attention.keys, attention.kv_head(head)),
        ):
            bias = projection.rows.bias(model)
            made = x @ matrix
            if bias is not None:
                width = attention.d_head
                made = made + bias[place * width : (place + 1) * width] * projection.factor
            exact = projection.apply(model, x)[:, place]
            if projection.norm is not None:
                factor = (made * exact).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True)
                assert (factor > 0).all()
                made = made * factor
            torch.testing.assert_close(made, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(OWN_ATTENTION))
def test_attention_outside_the_interface_has_values_but_no_verified_scores(name):
    model = wrapped(name)
    assert "attention interface" in heads(model, 1).qk_reason
    assert kinds(model, 1)[-2:] == ("attn.v", "attn.o")
    assert any("attention interface" in reason for reason in refusals(model, 1))
    with pytest.raises(ModelRefused, match="attention interface"):
        heads(model, 1).query(model, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_all_vectors_are_rows_as_wide_as_the_stream(name):
    model = wrapped(name)
    for block in (1, 2, 3):
        known = kinds(model, block)
        assert "attn.o" in known
        assert ("ffn.value" in known) == (name not in EXPERTS)
        for kind in known:
            rows = vectors(model, block, kind)
            assert rows.shape[1] == model.d_model
            assert rows.shape == vectors(model, block, kind, fold=True).shape


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EXPERTS])
def test_folded_readers_read_the_stream_as_plain_ones_read_the_norm(name):
    """Up to the size of the state, which is common to all readers, and what a shift adds."""
    model = wrapped(name)
    for block in (1, 2):
        sites = model.sites(block)
        for part, norm in (("attn", "attn_norm"), ("ffn", "ffn_norm")):
            if f"{norm}.in" not in sites:
                continue
            captured = model.capture(
                inputs(name), layers=(), sites=[(block, f"{norm}.in"), (block, f"{norm}.out")]
            ).sites
            before, after = (captured[block, f"{norm}.{side}"] for side in ("in", "out"))
            module = model.site_module(block, sites[f"{norm}.in"])
            shift = module(torch.zeros_like(before[:1, :1]))[0]
            for kind in kinds(model, block):
                if not kind.startswith(part) or kind not in READS:
                    continue
                exact = (after - shift) @ vectors(model, block, kind).T
                made = before @ vectors(model, block, kind, fold=True).T
                factor = (made * exact).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True)
                assert (factor > 0).all()
                torch.testing.assert_close(made * factor, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "olmo2", "opt", "gpt_neox"])
def test_folded_writers_are_what_the_final_norm_makes_of_them(name):
    model = wrapped(name)
    norm = model.model.get_submodule(model.tail[0].path)
    for kind in ("ffn.value", "attn.o"):
        plain, made = (vectors(model, 2, kind, fold=fold) for fold in (False, True))
        exact = norm(plain) - norm(torch.zeros_like(plain[:1]))
        factor = (made * exact).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True)
        assert (factor > 0).all()
        torch.testing.assert_close(made * factor, exact, rtol=1e-5, atol=1e-5)


def test_a_norm_or_scale_after_attention_is_part_of_what_a_head_writes():
    for name in ("gemma2", "olmo2"):
        model = wrapped(name)
        attention = heads(model, 2)
        norm = model.model.get_submodule(attention.after)
        raw = attention.outputs.of(model).T
        made = vectors(model, 2, "attn.o")
        exact = norm(raw)
        factor = (made * exact).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True)
        torch.testing.assert_close(made * factor, exact, rtol=1e-5, atol=1e-5)
    granite = heads(wrapped("granite"), 2)
    assert granite.scale == pytest.approx(0.3)


def test_bad_blocks_heads_kinds_and_offsets_are_named():
    model = wrapped("llama")
    with pytest.raises(BadSettings, match="block 2 has no head 4; expected 0 to 3"):
        heads(model, 2).query(model, 4)
    with pytest.raises(BadSettings, match="block 9 does not exist"):
        heads(model, 9)
    with pytest.raises(
        BadSettings, match=r"the kind of vectors is 'attn\.x'; expected one of 'ffn\.key'"
    ):
        vectors(model, 1, "attn.x")
    with pytest.raises(ModelRefused, match=r"has no ffn\.key; it has ffn\.gate and ffn\.up"):
        vectors(model, 1, "ffn.key")
    with pytest.raises(BadSettings, match="a causal model does not attend to later tokens"):
        heads(model, 1).rotation(model, -1)
    with pytest.raises(ModelRefused, match="mixture of experts"):
        vectors(wrapped("mixtral"), 1, "ffn.value")


def test_images_have_no_heads_to_be_shown_by_one_token():
    with pytest.raises(ModelRefused, match="reads images"):
        heads(wrapped("vit"), 1)


def test_rotations_are_orthogonal_and_add_up():
    model = wrapped("llama")
    one, two = (heads(model, 2).rotation(model, offset) for offset in (1, 2))
    torch.testing.assert_close(one @ one, two)
    torch.testing.assert_close(one @ one.T, torch.eye(len(one)).double())


def test_every_block_is_verified_by_two_passes():
    model = Transformer.wrap(build("llama"), check=False)
    passes = []
    with tapped(model.model, {model.model: Tap(see_input=lambda *call: passes.append(call))}):
        assert [each.block for each in all_heads(model).values()] == [1, 2, 3]
    assert len(passes) == 2


def test_a_norm_that_centres_is_recognised_in_half_precision_and_with_small_gains():
    for kind, centres in ((torch.nn.LayerNorm, True), (torch.nn.RMSNorm, False)):
        norm = kind(24)
        norm.weight.data = torch.linspace(1e-4, 3e-4, 24)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            fold = fold_of(norm.to(dtype), torch.zeros(1, 24, dtype=dtype))
            assert fold.centres == centres, (kind, dtype)


def test_after_a_post_norm_nothing_is_folded_into_readers():
    model = wrapped("bert")
    for kind in ("ffn.key", "attn.q", "attn.k", "attn.v"):
        assert torch.equal(vectors(model, 2, kind), vectors(model, 2, kind, fold=True))


def test_a_layer_norm_of_queries_and_keys_centres_each_head():
    """Without its gain, what a head's rows give for any state has mean 0."""
    model = wrapped("phi", qk_layernorm=True)
    attention = heads(model, 2)
    assert attention.is_normed
    for projection in (attention.queries, attention.keys):
        gain = model.model.get_submodule(projection.norm).weight
        rows = projection.of(model).unflatten(0, (attention.n_heads, attention.d_head))
        means = (rows / gain[:, None]).mean(1)
        torch.testing.assert_close(means, torch.zeros_like(means), rtol=0, atol=1e-9)
