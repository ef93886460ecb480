"""Top-k attention in every family: exact at large k, the definition at small k, and in decoding."""

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, StaticCache

import layerleap as ll
from contract_bank import bank_of
from dense_topk import dense_topk
from edit_cases import EXPERTS, OWN_ATTENTION, inputs, logits, traces, wrapped
from families import ALL, NEXT_TOKEN, build
from layerleap.act.decode.decoder import decoder
from layerleap.act.edits import ReplaceAttention, TopKAttention
from layerleap.errors import ModelRefused
from layerleap.models.transformer import Transformer

WITH_INTERFACE = [name for name in ALL if name not in OWN_ATTENTION]
DECODERS = [name for name in NEXT_TOKEN if name not in OWN_ATTENTION]
# Eager attention of these computes in float32 whatever the dtype.
TOLERANCE = {"gemma2": 1e-5}
PROMPT = [5, 9, 7, 5, 9, 7, 8, 5, 9]
OPTIONS = {"max_new_tokens": 12, "do_sample": False}


def definition(k):
    """The attention function of the definition, from the whole matrix of scores."""

    def attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=None,
        softcap=None,
        s_aux=None,
        position_bias=None,
        **kwargs,
    ):
        n, keys = query.shape[2], key.shape[2]
        mask, bias = torch.ones(1, 1, n, keys, dtype=torch.bool), position_bias
        if attention_mask is None:
            is_causal = kwargs.get("is_causal")
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            mask = mask.tril(keys - n) if is_causal and n > 1 else mask
        elif attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            mask = attention_mask > -1e30
        options = {"scaling": scaling, "softcap": softcap, "sinks": s_aux}
        return dense_topk(query, key, value, k, mask=mask, bias=bias, **options), None

    return attend


def real(name, values):
    """Rows of real tokens: what padding says depends on the implementation."""
    mask = inputs(name).get("attention_mask")
    fits = mask is not None and values.dim() == 3 and mask.shape == values.shape[:2]
    return values[mask.bool()] if fits else values


@pytest.fixture
def implementation():
    """Sets the attention implementation of a model for one test."""
    changed = []

    def put(model, name):
        changed.append((model, model.config._attn_implementation))
        model.set_attn_implementation(name)

    yield put
    for model, name in reversed(changed):
        model.set_attn_implementation(name)


@pytest.mark.parametrize("name", WITH_INTERFACE)
def test_k_at_or_above_the_length_is_exact_attention(name, implementation):
    clean, tolerance = real(name, logits(name)), TOLERANCE.get(name, 1e-10)
    with wrapped(name).edit(TopKAttention(k=64, chunk=2)) as report:
        edited = real(name, logits(name))
    assert not report.unused
    torch.testing.assert_close(edited, clean, rtol=0, atol=tolerance)
    implementation(wrapped(name).model, ll.topk_attention(64, 2))
    torch.testing.assert_close(real(name, logits(name)), clean, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", WITH_INTERFACE)
def test_small_k_is_the_definition_in_the_chosen_blocks(name):
    for edit, k, blocks in (
        (TopKAttention(k=1, chunk=2), 1, None),
        (TopKAttention(k={2: 2, 3: 2}, chunk=3), 2, [2, 3]),
        (TopKAttention(k=2, blocks=[3]), 2, [3]),
    ):
        with wrapped(name).edit(edit):
            ours = real(name, logits(name))
        with wrapped(name).edit(ReplaceAttention(definition(k), blocks)):
            theirs = real(name, logits(name))
        tolerance = TOLERANCE.get(name, 1e-9)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
        assert not torch.allclose(ours, real(name, logits(name)), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "gpt_oss", "bert"])
def test_both_doors_give_the_same(name, implementation):
    by_block = {1: 2, 3: 1}
    with wrapped(name).edit(TopKAttention(k=by_block, chunk=2)):
        edited = real(name, logits(name))
    implementation(wrapped(name).model, ll.topk_attention(by_block, 2))
    torch.testing.assert_close(real(name, logits(name)), edited, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_k_by_head_changes_those_heads_only(name):
    model = wrapped(name)
    with model.edit(TopKAttention(k={2: (64, 1, 64, 64)})):
        one = logits(name)
    with model.edit(TopKAttention(k={2: (64, 64, 64, 64)})):
        none = logits(name)
    torch.testing.assert_close(none, logits(name), rtol=0, atol=1e-10)
    with model.edit(ReplaceAttention(definition((64, 1, 64, 64)), [2])):
        theirs = logits(name)
    torch.testing.assert_close(real(name, one), real(name, theirs), rtol=0, atol=1e-10)
    assert not torch.allclose(one, none, atol=1e-4)


@pytest.mark.parametrize("name", sorted(OWN_ATTENTION))
def test_attention_outside_the_interface_is_refused_by_name(name, tmp_path):
    with (
        pytest.raises(ModelRefused, match=r"ForCausalLM does not use .* AttentionInterface"),
        wrapped(name).edit(TopKAttention()),
    ):
        pass
    if name not in ("bloom", "mpt"):  # transformers refuses the others itself
        return
    build(name).save_pretrained(tmp_path)
    model = type(build(name)).from_pretrained(tmp_path, attn_implementation=ll.topk_attention(4))
    with pytest.raises(ModelRefused, match=f"(?i){name}model does not use .* AttentionInterface"):
        model(torch.tensor([PROMPT]))


@pytest.fixture(scope="module", params=DECODERS)
def case(request):
    return request.param, prepared(request.param)


def prepared(name, **changes):
    model = build(name, **changes)
    model = model if name in EXPERTS else model.double()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.config.use_cache = model.generation_config.use_cache = True
    return Transformer.wrap(model, check=False)


def written(transformer, ids=None, k=3, **options):
    ids = torch.tensor([PROMPT]) if ids is None else ids
    with transformer.edit(TopKAttention(k=k, chunk=4)):
        return transformer.model.generate(ids, **{**OPTIONS, **options})


def test_text_is_the_same_with_and_without_a_cache_and_in_pieces(case):
    _, transformer = case
    text = written(transformer)
    assert torch.equal(written(transformer, use_cache=False), text)
    assert torch.equal(written(transformer, prefill_chunk_size=4), text)
    if "sdpa" in transformer.model.config._attn_implementation:
        assert torch.equal(written(transformer, cache_implementation="static"), text)


def test_chunked_prefill_gives_the_logits_of_one_pass(case):
    name, transformer = case
    ids, cache, parts = torch.tensor([[*PROMPT, 3, 4]]), DynamicCache(), []
    with torch.no_grad(), transformer.edit(TopKAttention(k=3, chunk=2)):
        whole = transformer.model(ids, use_cache=False).logits
        for part in ids.split([4, 1, 3, 3], 1):
            parts.append(transformer.model(part, past_key_values=cache).logits)
    tolerance = 1e-4 if name in EXPERTS else TOLERANCE.get(name, 1e-9)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=tolerance)


def test_padding_on_the_left_changes_nothing(case):
    _, transformer = case
    ids = torch.tensor([PROMPT, [0, 0, 0, 0, 11, 12, 13, 11, 12]])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    if case[0] == "gemma2":
        transformer = Transformer.wrap(transformer.model.float(), check=False)
    both = written(transformer, ids, attention_mask=mask)
    for row, skip in enumerate((0, 4)):
        assert torch.equal(both[row, skip:], written(transformer, ids[row : row + 1, skip:])[0])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen3"])
def test_exact_decoders_write_what_generate_writes(name):
    transformer = prepared(name)
    bank = bank_of(transformer)
    theirs = written(transformer)
    for options in ({}, {"drafts": ("lookup",)}, {"drafts": ("early",), "draft_layer": 1}):
        custom = decoder(bank, transformer=transformer, **options)
        assert torch.equal(written(transformer, custom_generate=custom), theirs)
    assert not torch.equal(transformer.model.generate(torch.tensor([PROMPT]), **OPTIONS), theirs)


def test_early_exit_runs_under_the_edit_and_at_the_last_layer_writes_what_generate_writes():
    transformer = prepared("llama")
    theirs, texts = written(transformer), []
    for layer in (transformer.n_layers, 1):
        custom = decoder(bank_of(transformer), transformer=transformer, rule=ll.exits.Fixed(layer))
        texts.append(written(transformer, custom_generate=custom))
    assert torch.equal(texts[0], theirs)
    assert texts[1].shape == theirs.shape


def test_exact_decoders_write_the_same_bits_in_bfloat16():
    model = build("llama").bfloat16()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    transformer = Transformer.wrap(model, check=False)
    custom = decoder(bank_of(transformer), transformer=transformer)
    assert torch.equal(written(transformer, custom_generate=custom), written(transformer))


@pytest.mark.parametrize("how", ["in parts", "token by token", "padded on the left"])
def test_equal_scores_of_bfloat16_are_selected_alike_in_any_layout(how):
    """Products of half precision are often equal where the selection ends."""
    model = build("llama", max_position_embeddings=512, initializer_range=0.15).bfloat16()
    transformer = Transformer.wrap(model, check=False)
    ids = torch.randint(3, 60, (1, 240), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), transformer.edit(TopKAttention(k=8, chunk=64)):
        whole = model(ids, use_cache=False).logits
        if how == "padded on the left":
            padded = torch.cat([ids.new_zeros(1, 37), ids], 1)
            mask = (torch.arange(277) >= 37).long()[None]
            places = (mask.cumsum(1) - 1).clamp_min(0)
            other = model(padded, attention_mask=mask, position_ids=places).logits[:, 37:]
        else:
            cache, size = DynamicCache(), 64 if how == "in parts" else 1
            parts = [model(part, past_key_values=cache).logits for part in ids.split(size, 1)]
            other = torch.cat(parts, 1)
    assert (other - whole).abs().max() <= 0.02 * whole.abs().max()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_in_mixed_precision_has_the_gradients_of_sdpa_at_large_k(
    implementation, checkpointed
):
    model, ids = build("llama").train(), torch.tensor([PROMPT])
    if checkpointed:
        model.gradient_checkpointing_enable()
    found = []
    for name in ("sdpa", ll.topk_attention(99), ll.topk_attention(2)):
        implementation(model, name)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    theirs, ours, few = found
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05 * float(theirs.abs().max()))
    assert few.isfinite().all()
    assert not torch.allclose(few, ours)


@pytest.mark.parametrize("door", ["edit", "name"])
def test_a_static_cache_gives_the_logits_of_one_pass(door, implementation):
    """Its prompt comes without a mask, but with empty keys behind it."""
    transformer = prepared("llama")
    model, ids = transformer.model, torch.tensor([[*PROMPT, 3, 4]])
    with torch.no_grad(), transformer.edit(TopKAttention(k=3)):
        whole = model(ids, use_cache=False).logits
    cache, parts = StaticCache(config=model.config, max_cache_len=20), []
    if door == "name":
        implementation(model, ll.topk_attention(3))
    for part in ids.split([8, 1, 2], 1):
        with torch.no_grad():
            if door == "name":
                parts.append(model(part, past_key_values=cache).logits)
                continue
            with transformer.edit(TopKAttention(k=3)):
                parts.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "t5", "bert"])
def test_training_gives_the_gradients_of_the_definition(name):
    model = wrapped(name).model
    grads = []
    for edit in (TopKAttention(k=2, chunk=2), ReplaceAttention(definition(2))):
        model.zero_grad()
        with wrapped(name).edit(edit):
            real(name, model(**inputs(name)).logits).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradient_checkpointing_gives_the_same_gradients(dropout):
    model = build("llama", attention_dropout=dropout).double().train()
    model.set_attn_implementation(ll.topk_attention(2, 3))
    grads, ids = [], torch.tensor([PROMPT])
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(0)
        model(ids, labels=ids).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


def test_the_edit_trains_with_gradient_checkpointing():
    """Blocks run again in the backward pass, outside a pass of the model."""
    model = build("llama").double().train()
    transformer, grads, ids = Transformer.wrap(model, check=False), [], torch.tensor([PROMPT])
    for checkpointing in (False, True):
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        with transformer.edit(TopKAttention(k=2, chunk=3)) as report:
            model(ids, labels=ids, use_cache=False).loss.backward()
        assert str(len(PROMPT)) in str(report)
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


def test_errors_leave_the_former_implementation():
    model, lookup = wrapped("llama"), AttentionInterface.get_interface
    before, clean = traces(model.model), logits("llama")

    def run():
        with model.edit(TopKAttention(k=1)):
            assert not torch.equal(logits("llama"), clean)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run()
    assert traces(model.model) == before
    assert AttentionInterface.get_interface is lookup
    assert torch.equal(logits("llama"), clean)
