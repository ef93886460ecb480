"""Attention patterns of every family, whatever implementation it runs with."""

from functools import cache

import pytest
import torch

from edit_cases import wrapped
from families import ALL, CLASSIFIERS
from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.attention.attention import attention
from layerleap.lens.attention.heads import heads
from layerleap.models.discovery.probe import probe
from layerleap.models.weights import heads as heads_of

FAMILIES = list({**ALL, **CLASSIFIERS})
IMAGES = {"vit", "deit", "dinov2", "beit", "dinov2_patches"}
WINDOWED = {"mistral", "gemma2", "gemma3", "gpt_oss", "gpt_neo"}  # some blocks see 4 tokens
SINKS = {"gpt_oss"}


@cache
def given(name):
    return probe(wrapped(name).model, rows=1, seed=4)


@cache
def made(name):
    return attention(wrapped(name), given(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_sum_to_one_and_hidden_positions_get_exactly_nothing(name):
    model, result = wrapped(name), made(name)
    assert set(result.weights) == {1, 2, 3}
    for block, weights in result.weights.items():
        assert weights.shape[1:] == (len(result.tokens),) * 2
        sums = weights.sum(-1)
        if name in SINKS:
            assert ((sums > 0.01) & (sums < 0.999)).all()
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-6, rtol=0)
        if model.kind == "next-token" or "gpt2_" in name or "llama_" in name:
            assert (weights.triu(1) == 0).all()
        elif name not in IMAGES:
            assert (weights > 0).all()
        if name in WINDOWED and block in (1, 2):
            is_far = torch.ones(weights.shape[1:]).tril(-4).bool()
            windows = [(made(name).weights[one][:, is_far] == 0).all() for one in (1, 2)]
            assert any(windows)


@pytest.mark.parametrize("name", FAMILIES)
def test_patterns_are_those_of_eager_attention(name):
    """The same weights in a model that is loaded for eager attention and returns its own."""
    other = wrapped(name, attn_implementation="eager")
    with torch.no_grad():
        output = other.model(**given(name), output_attentions=True)
    if name == "falcon_alibi":  # its two implementations scale the position bias differently
        with torch.no_grad():
            assert not torch.allclose(wrapped(name).model(**given(name)).logits, output.logits)
        own = attention(other, given(name)).weights[2]
        torch.testing.assert_close(own, output.attentions[1][0], atol=1e-6, rtol=1e-5)
        return
    exact = getattr(output, "decoder_attentions", None) or output.attentions
    for block, weights in made(name).weights.items():
        torch.testing.assert_close(weights, exact[block - 1][0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in IMAGES])
def test_patterns_times_values_and_outputs_are_what_attention_adds(name):
    model = wrapped(name)
    for block in (1, 3):
        own = heads_of(model, block)
        captured = model.capture(
            given(name), layers=(), sites=[(block, "attn.in"), (block, "attn.out")]
        ).sites
        x, exact = captured[block, "attn.in"][0], captured[block, "attn.out"][0]
        bias, shift = own.values.bias(model), own.outputs.bias(model)
        total = torch.zeros_like(exact) + (0 if shift is None else shift)
        for head in range(own.n_heads):
            kv = own.kv_head(head)
            part = slice(kv * own.d_value, (kv + 1) * own.d_value)
            values = x @ own.value(model, head) + (0 if bias is None else bias[part])
            mine = slice(head * own.d_value, (head + 1) * own.d_value)
            total += made(name).weights[block][head] @ values @ own.outputs.of(model).T[mine]
        torch.testing.assert_close(total, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_measures_are_those_of_a_plain_loop(name):
    result = made(name)
    rows = {(row["block"], row["head"]): row for row in result.rows()}
    weights = result.weights[2][1]
    entropy, distance, first = [], [], []
    for t in range(1, len(weights)):
        row = weights[t].tolist()
        entropy.append(-sum(w * torch.log(torch.tensor(w)).item() for w in row if w > 0))
        distance.append(sum(w * abs(t - s) for s, w in enumerate(row)) / sum(row))
        first.append(row[0])
    own, n = rows[2, 1], len(entropy)
    assert own["entropy"] == pytest.approx(sum(entropy) / n, rel=1e-4)
    assert own["distance"] == pytest.approx(sum(distance) / n, rel=1e-4)
    assert own["first"] == pytest.approx(sum(first) / n, rel=1e-4)
    assert ("first_weighted" in own) == (name not in IMAGES)
    if name not in IMAGES:
        shares = result.weighted(2)
        assert torch.allclose(shares.sum(-1), torch.ones_like(shares[..., 0]), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in IMAGES | {"whisper"}])
def test_named_patterns_are_shares_of_every_head(name):
    result = heads(wrapped(name), n_texts=2, n_tokens=4)
    assert len(result.rows()) == 3 * len(made(name).weights[1])
    for shares in result.shares.values():
        for one in shares.values():
            assert 0 <= one.low <= one.value <= one.high <= 1
    again = heads(wrapped(name), n_texts=2, n_tokens=4)
    assert again.to_dict() == result.to_dict()


def test_a_replaced_attention_is_shown_as_it_is():
    from layerleap.act.edits import TopKAttention

    model = wrapped("llama")
    with model.edit(TopKAttention(k=1)):
        weights = attention(model, given("llama")).weights[2]
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    assert (weights.sum(-1) == 1).all()


def test_models_that_read_no_text_have_no_named_patterns():
    with pytest.raises(ModelRefused, match="reads no text"):
        heads(wrapped("vit"))


def test_the_strongest_heads_of_a_pattern_are_a_table_and_unknown_patterns_are_refused():
    result = heads(wrapped("llama"), n_texts=2, n_tokens=4)
    strongest = result.of("induction", 3)
    shares = sorted((one["induction"].value for one in result.shares.values()), reverse=True)
    assert [row["share"] for row in strongest.rows()] == shares[:3]
    assert strongest.rows()[0]["name"] in str(strongest)
    assert "{" not in str(strongest)
    with pytest.raises(BadSettings, match="did you mean 'induction'"):
        result.of("inductio")


def test_one_text_gives_no_intervals_and_no_names():
    result = heads(wrapped("llama"), n_texts=1, n_tokens=4)
    assert "without names" in result.short()
    assert "on 1 text of" in result.legend()
    assert "95 %" not in result.legend()
    assert "first from the third" in result.legend()
    assert "on 2 texts of" in heads(wrapped("llama"), n_texts=2, n_tokens=4).legend()


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (1, "from the only position"),
        (2, "from the second position"),
        (3, "means over all positions but the first"),
    ],
)
def test_what_measures_are_means_of_is_said_of_them_and_not_of_the_strip(length, words):
    result = attention(wrapped("llama"), list(range(5, 5 + length)))
    assert words not in result.headline()
    assert words in result.legend()
    strip, *maps = result.picture()["shapes"]
    assert strip["title"].startswith(f"weights from position {length - 1}, ")
    assert all(words in one["title"] for one in maps)
    assert "positions away" in result.legend()
