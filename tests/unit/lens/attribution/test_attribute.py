"""Direct logit attribution on the bundled model, and what it refuses."""

import pytest
import torch

import layerleap as ll
from layerleap.errors import BadSettings, BadText, LayerleapError, ModelRefused
from tiny_models import sentences, tiny

PROMPT = "The capital of France is"


@torch.no_grad()
def by_hand(model, prompt, token, other):
    """Contributions of heads and FFNs with plain hooks, as one would write them in a notebook."""
    ids = torch.tensor([model.tokenizer(prompt)["input_ids"]])
    a, b = (model.tokenizer(word)["input_ids"][0] for word in (token, other))
    bare, seen, hooks = model.model, {}, []
    for number, layer in enumerate(bare.model.layers, 1):

        def keep_heads(module, args, number=number):
            seen[number, "z"] = args[0][0, -1].double()

        def keep_ffn(module, args, output, number=number):
            seen[number, "ffn"] = output[0, -1].double()

        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(keep_heads))
        hooks.append(layer.mlp.register_forward_hook(keep_ffn))
    hooks.append(
        bare.model.norm.register_forward_pre_hook(
            lambda module, args: seen.__setitem__("last", args[0][0, -1].double())
        )
    )
    logits = bare(ids).logits[0, -1].double()
    for hook in hooks:
        hook.remove()
    last, norm = seen["last"], bare.model.norm
    size = (last.square().mean() + norm.variance_epsilon).sqrt()
    unembedded = (bare.lm_head.weight[a] - bare.lm_head.weight[b]).double()
    direction = norm.weight.double() * unembedded / size
    found, heads = {}, bare.config.num_attention_heads
    for number, layer in enumerate(bare.model.layers, 1):
        weight = layer.self_attn.o_proj.weight.double()
        for head, (z, own) in enumerate(
            zip(seen[number, "z"].chunk(heads), weight.chunk(heads, dim=1), strict=True)
        ):
            found[f"L{number}.H{head}"] = float(own @ z @ direction)
        found[f"L{number}.ffn"] = float(seen[number, "ffn"] @ direction)
    return found, float(logits[a] - logits[b])


@pytest.mark.real
def test_the_capital_of_france_is_written_by_the_heads_that_plain_hooks_find(smollm2):
    result = ll.attribute(smollm2, PROMPT, " Paris", against=" London", by="head")
    exact, difference = by_hand(smollm2, PROMPT, " Paris", " London")
    own = {row["name"]: row["direct"] for row in result.rows()}
    for name, value in exact.items():
        assert own[name] == pytest.approx(value, abs=1e-4)
    assert set(own) == {*exact, "embedding"}
    assert result.value == pytest.approx(difference, abs=1e-4)
    assert abs(result.residue) < 1e-4
    assert [row["name"] for row in result.strongest(1)] == ["L24.H4"]
    sources = ll.attribute(smollm2, PROMPT, " Paris", against=" London", by="source")
    first = sources.strongest(1)[0]
    assert (first["name"], first["token"]) == ("L24.H4", "\u2423France")
    assert first["direct"] == pytest.approx(own["L24.H4"], abs=0.1)


@pytest.mark.real
def test_a_word_without_its_space_is_another_token_and_said_to_be(smollm2):
    (note,) = ll.attribute(smollm2, PROMPT, "Paris").notes
    assert note == "'Paris' has no space in front; ' Paris' is another token, and likelier here"
    assert ll.attribute(smollm2, PROMPT).what == "logit of \u2423Paris"


@pytest.mark.real
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token": "Paris is"}, "'Paris is' is 2 tokens of this model ('Paris', ' is'); expected"),
        ({"token": 10**6}, "output 1000000 does not exist: this model has outputs 0 to 49151"),
        ({"token": " Paris", "against": [" Paris"]}, "expected one or more tokens other than"),
        ({"against": []}, "expected one or more tokens"),
        ({"position": 5}, "position 5 does not exist: the text has 5 tokens"),
        ({"position": -6}, "position -6 does not exist"),
        ({"layer": 31}, "layer 31 does not exist: this model has layers 0 to 30"),
        ({"by": "heads"}, "did you mean 'head'?"),
        ({"top": -1}, "top is -1; expected 0 or more"),
        ({"by": "source", "total": True}, "expected one of these as by"),
    ],
)
def test_bad_input_is_one_clear_sentence(smollm2, arguments, message):
    with pytest.raises(BadSettings) as caught:
        ll.attribute(smollm2, PROMPT, **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prompts_come_one_at_a_time_and_not_empty():
    model = tiny()
    with pytest.raises(BadSettings, match="got 2 prompts; expected one at a time"):
        ll.attribute(model, ["the cat", "a dog"])
    with pytest.raises(BadText, match="the text is empty"):
        ll.attribute(model, "")
    with pytest.raises(BadSettings, match="a batch of several inputs"):
        ll.attention(model, {"input_ids": torch.ones(2, 3).long(), "position_ids": None, "x": 1})
    one = ll.attribute(model, torch.tensor([5, 9, 6]))
    assert one.value == ll.attribute(model, [[5, 9, 6]]).value


def test_positions_before_the_last_are_attributed_too():
    model = tiny()
    ids = torch.tensor([[5, 9, 33, 7, 12]])
    with torch.no_grad():
        logits = model.model(ids).logits[0]
    for position in (0, 2, -2):
        result = ll.attribute(model, ids[0], position=position, by="source")
        assert result.value == pytest.approx(float(logits[position].max()), abs=1e-5)
        assert abs(result.residue) < 1e-4
        later = [row for row in result.rows() if (row["source"] or 0) > position % 5]
        assert all(row["direct"] == 0 for row in later)


def test_components_are_removed_on_a_text_of_ones_own():
    model = tiny()
    result = ll.attribute(
        model, "the cat sat", by="head", total=True, text=sentences(9), n_texts=9, progress=False
    )
    assert "positions of a text" in result.notes[0]
    rows = result.rows()
    assert {row["part"] for row in rows if row["if_removed"] is None} == {"embedding"}
    assert "if_removed" in result.to_pandas()
    assert "if removed" in str(result)


def test_before_the_first_block_there_is_only_the_embedding():
    for by in ("part", "head", "neuron"):
        result = ll.attribute(tiny(), "the cat", by=by, layer=0, total=True)
        assert [row["name"] for row in result.rows()] == ["embedding"]
        assert result.total == pytest.approx(result.value, abs=1e-4)
        assert len(result.picture()["shapes"]) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_add_up_to_their_rounding(dtype):
    model = tiny("llama")
    narrow = ll.load(model.model.to(dtype), tokenizer=model.tokenizer)
    for by in ("part", "head", "neuron", "source"):
        result = ll.attribute(narrow, "the cat sat on the", by=by)
        assert abs(result.residue) < 0.1 * max(1.0, abs(result.value))


def test_a_class_is_attributed_by_its_name():
    from families import build

    model = build("gpt2_text")
    model.config.id2label = {0: "bad", 1: "fair", 2: "good", 3: "great"}
    model.config.pad_token_id = 0
    wrapped = ll.Transformer.wrap(model, tiny().tokenizer)
    result = ll.attribute(wrapped, "the cat sat", "good", against="bad")
    assert result.what == "logit of good \u2212 bad"
    assert abs(result.residue) < 1e-4
    with pytest.raises(BadSettings, match="did you mean 'good'"):
        ll.attribute(wrapped, "the cat sat", "gooood")
    with pytest.raises(BadSettings, match="classifies whole inputs, from position 2"):
        ll.attribute(wrapped, "the cat sat", position=0)


def test_heads_blocks_and_positions_of_attention_are_checked():
    model = tiny()
    for arguments, message in (
        ({"head": 4}, "head 4 does not exist: this model has heads 0 to 3"),
        ({"block": 4}, "block 4 does not exist: this model has blocks 1 to 3"),
        ({"position": 3}, "position 3 does not exist: the text has 3 tokens"),
    ):
        with pytest.raises(LayerleapError) as caught:
            ll.attention(model, "the cat sat", **arguments)
        assert message in str(caught.value)
    with pytest.raises(BadSettings, match="expected at least 1 and 2"):
        ll.heads(model, n_tokens=1)


def test_patterns_that_do_not_fit_in_memory_are_refused(monkeypatch):
    monkeypatch.setattr("layerleap.lens.attention.recorder.BUDGET", 1000)
    with pytest.raises(BadSettings, match="more than fit in 1 GB; name a block"):
        ll.attention(tiny(), " ".join(["the cat"] * 20))


def test_one_position_and_one_head_are_measured_alone():
    model = tiny()
    whole = ll.attention(model, "the cat sat on the mat")
    last = ll.attention(model, "the cat sat on the mat", 2, 1, position=-1)
    (row,) = last.rows()
    assert row["first"] == pytest.approx(float(whole.weights[2][1, -1, 0]), abs=1e-6)
    assert last.to_dict()["weights"]["L2"][0][-1] == pytest.approx(
        whole.weights[2][1, -1].tolist(), abs=1e-6
    )
    assert len(last.picture()["shapes"]) == 2
    assert len(whole.picture()["shapes"]) == 4


def test_an_induction_head_made_by_hand_is_found():
    """Shares of patterns that are known: a head that looks one back, and one that repeats."""
    from layerleap.lens.attention.heads import PATTERNS, _shares

    n = 5
    weights = torch.zeros(4, 1 + 2 * n, 1 + 2 * n)
    for t in range(1, 1 + 2 * n):
        weights[0, t, t - 1] = weights[1, t, 0] = 1
        if t > n:
            weights[2, t, t - n] = weights[3, t, t - n + 1] = 1
    shares = _shares(weights, n)
    assert PATTERNS == ("previous", "first", "duplicate", "induction")
    assert shares.diagonal().tolist() == [1.0, 1.0, 1.0, 1.0]
    assert shares.sum() < 4.5


@pytest.mark.parametrize("call", [ll.attribute, ll.attention, lambda model, _: ll.heads(model)])
def test_a_model_in_training_mode_is_refused(call):
    model = tiny("gpt2")
    model.model.train()
    with pytest.raises(ModelRefused, match="is in training mode"):
        call(model, "the cat sat")


def test_as_many_neurons_have_rows_as_were_asked_for_even_if_some_are_equal():
    model = tiny("opt")  # its activation gives exact zeros
    for top in (0, 1, 119, 10**6):
        rows = ll.attribute(model, "the cat sat", by="neuron", top=top).lines()
        neurons = [row for row in rows if row["neuron"] is not None]
        width = sum(model.block(block).fc1.out_features for block in (1, 2, 3))
        assert len(neurons) == min(top, width)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama"])
def test_sizes_of_values_are_measured_after_the_gain_of_a_norm_behind_attention(name):
    model = tiny(name)
    norm = getattr(model.block(2), "post_attention_layernorm", None) if name != "llama" else None
    if norm is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.randn(norm.weight.shape))
        model = type(model).wrap(model.model, model.tokenizer)
    result = ll.attention(model, "the cat sat on the mat", block=2)
    attention = model.block(2).self_attn
    heads, kv = model.model.config.num_attention_heads, model.model.config.num_key_value_heads
    x = model.capture("the cat sat on the mat", layers=(), sites=[(2, "attn.in")]).sites[
        2, "attn.in"
    ]
    values = attention.v_proj(x)[0].unflatten(-1, (kv, -1)).repeat_interleave(heads // kv, 1)
    weight = attention.o_proj.weight.unflatten(1, (heads, -1))
    written = torch.einsum("phd,mhd->hpm", values, weight)
    if norm is not None:
        written = written * (1 + norm.weight)  # Gemma's gain
    exact = written.norm(dim=-1).detach()
    shares = result.weights[2] * exact[:, None]
    torch.testing.assert_close(
        result.weighted(2), shares / shares.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6
    )


def test_a_table_shows_the_neurons_that_were_asked_for():
    result = ll.attribute(tiny("llama"), "the cat sat", by="neuron", top=30)
    (grid,) = result.grids()
    assert len(grid.rows) == 30
    assert result.legend().startswith("The strongest 30 neurons; ")
    assert len(list(ll.attribute(tiny("llama"), "the cat sat", by="neuron", top=0).grids())) == 1


def test_a_bank_without_a_layer_is_refused():
    with pytest.raises(BadSettings, match="a bank reads an inner layer; name one by layer"):
        ll.attribute(tiny("llama"), "the cat sat", bank="default")
