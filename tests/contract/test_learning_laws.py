"""Learning over families, in float64: what each block's gradient depends on, and what is left."""

import copy

import pytest
import torch

from edit_cases import OWN_ATTENTION, traces, wrapped
from families import NEXT_TOKEN
from layerleap.act.edits import AddNeuron, ApplyDelta
from layerleap.act.learning.delta import Delta
from layerleap.act.learning.descent import learn
from layerleap.act.learning.gradients import gradients
from layerleap.act.learning.lessons import lesson
from layerleap.act.learning.observe import Prompt, observe
from layerleap.act.learning.parameters import choose
from layerleap.errors import BadSettings, NotFinite
from layerleap.lens.lens import Lens
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap
from layerleap.models.hooks.forward import hooks_of
from layerleap.models.transformer import Transformer
from layerleap.models.weights import feed_forward, heads
from learning_cases import FAMILIES, demonstrations, found, ids, perturbed, reference, values


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_block_never_changes_layer_causal_gradients_of_earlier_ones(name):
    model = wrapped(name)
    other = perturbed(name, 2, f"{feed_forward(model, 2).down.path}.weight")
    before, after = found(model, "layer-causal"), found(other, "layer-causal")
    chosen = choose(model)
    for parameter in chosen.of_block(1):
        assert torch.equal(before.tensors[parameter], after.tensors[parameter])
    # In parallel blocks attention does not read what the FFN wrote: only the loss behind it moves.
    for block in (2, 3):
        changed = [
            not torch.equal(before.tensors[n], after.tensors[n]) for n in chosen.of_block(block)
        ]
        assert any(changed)
    assert before.losses[1] == after.losses[1]
    assert before.losses[2] != after.losses[2]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_block_does_change_plain_gradients_of_earlier_ones(name):
    model = wrapped(name)
    other = perturbed(name, 2, f"{feed_forward(model, 2).down.path}.weight")
    before, after = found(model, "full"), found(other, "full")
    for parameter in choose(model).of_block(1):
        size = before.tensors[parameter].norm()
        assert (before.tensors[parameter] - after.tensors[parameter]).norm() > 1e-4 * size


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("parameters", ["keys-values", "blocks"])
def test_the_last_block_learns_the_same_both_ways(name, parameters):
    model = wrapped(name)
    plain, causal = (found(model, how, parameters) for how in ("full", "layer-causal"))
    for parameter in choose(model, parameters).of_block(model.n_layers):
        assert torch.equal(plain.tensors[parameter], causal.tensors[parameter])
    assert plain.losses == {model.n_layers: causal.losses[model.n_layers]}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (name, parameters)
        for name in (*FAMILIES, "mistral", "falcon_new", "gptj")
        for parameters in ("keys-values", "blocks", "all")
        if parameters != "keys-values" or name not in OWN_ATTENTION  # keys that are not verified
    ],
)
@pytest.mark.parametrize("how", ["full", "layer-causal"])
def test_gradients_are_those_of_one_backward_pass_of_torch(name, parameters, how):
    model = wrapped(name)
    chosen, batch = choose(model, parameters), lesson(model, demonstrations(2))
    expected = reference(model, batch, chosen, causal=how == "layer-causal")
    ours = found(model, how, parameters).tensors
    # Some families compute attention or norms in float32, whatever the model's dtype.
    allowed = {"gptj": 1e-5, "gemma2": 1e-7, "cohere": 1e-7}.get(name, 1e-9)
    scale = max(float(value.norm()) for value in expected.values())
    assert set(ours) == set(chosen.names)
    for parameter, value in expected.items():
        assert (ours[parameter] - value).norm() <= allowed * scale, parameter


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_number_of_rows_at_a_time_changes_nothing(name, monkeypatch):
    model = wrapped(name)
    together = found(model, "layer-causal", "all")
    for entries in (61, 61 * 5, 61 * 17):
        monkeypatch.setattr("layerleap.memory.LOGITS", entries)
        apart = found(model, "layer-causal", "all")
        for parameter, value in together.tensors.items():
            torch.testing.assert_close(apart.tensors[parameter], value, rtol=1e-9, atol=1e-12)
        assert apart.losses == pytest.approx(together.losses)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_through_a_bank_each_layer_learns_by_the_reading_of_its_map(name):
    model = wrapped(name)
    generator = torch.Generator().manual_seed(3)
    d, last = model.d_model, model.n_layers
    maps = [
        LinearMap(src, last, weight=torch.randn(d, d, generator=generator) / d**0.5)
        for src in range(last)
    ]
    bank = ShortcutBank(maps, model=model.identity.to_dict(), n_layers=last, d_model=d)
    lens, batch = Lens(model, bank), lesson(model, demonstrations(2))
    causal = found(model, "layer-causal", lens=lens)
    states = model.capture(batch.inputs, keep=batch.keep).states
    for layer in range(1, last + 1):
        log_p = lens.logits(states[layer], layer).log_softmax(-1)
        loss = -(log_p.gather(1, batch.targets[:, None])[:, 0] * batch.weights).sum()
        assert causal.losses[layer] == pytest.approx(loss.item(), rel=1e-9)
    plain = found(model, "layer-causal")
    for block in (1, 2):
        for parameter in choose(model).of_block(block):
            assert not torch.allclose(plain.tensors[parameter], causal.tensors[parameter])
    for parameter in choose(model).of_block(last):
        assert torch.equal(plain.tensors[parameter], causal.tensors[parameter])


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi3"])
def test_only_keys_and_values_of_a_fused_matrix_learn(name):
    model = wrapped(name)
    delta = learn(model, demonstrations(), learning_rate=0.1).delta
    for block in range(1, model.n_layers + 1):
        own = heads(model, block)
        rows = {"queries": own.queries.rows, "keys": own.keys.rows, "values": own.values}
        assert len({one.path for one in rows.values()}) == 1
        weight = delta.tensors[f"{own.values.path}.weight"]
        weight = weight.T if own.values.is_transposed else weight
        assert not weight[list(rows["queries"].chosen)].any()
        assert weight[list(rows["keys"].chosen)].any(1).all()
        assert weight[list(rows["values"].chosen)].any(1).all()
        bias = delta.tensors.get(f"{own.values.path}.bias")
        if bias is not None:
            assert not bias[list(rows["queries"].chosen)].any()
            assert bias[list(rows["values"].chosen)].all()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_grouped_heads_learn_their_shared_keys_and_values(name):
    model = wrapped(name)
    own = heads(model, 1)
    assert own.n_kv_heads < own.n_heads
    chosen = choose(model)
    shapes = {n: model.model.get_parameter(n).shape for n in chosen.of_block(1)}
    assert shapes[f"{own.keys.rows.path}.weight"] == (own.n_kv_heads * own.d_head, model.d_model)
    assert all(mask is None for mask in chosen.masks.values())


@pytest.mark.parametrize("name", NEXT_TOKEN)
def test_an_applied_delta_computes_what_a_merged_model_computes(name):
    model = wrapped(name)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.02
        for n, p in model.model.named_parameters()
    }
    delta = Delta.of(model, tensors)
    batch = lesson(model, demonstrations(2)).inputs
    with torch.no_grad():
        before = model.model(**batch).logits
        with model.edit(ApplyDelta(delta)) as report:
            applied = model.model(**batch).logits
        merged = delta.merged(model)(**batch).logits
        after = model.model(**batch).logits
    assert torch.equal(applied, merged)
    assert not torch.allclose(applied, before)
    assert torch.equal(before, after)
    assert report[0].passes == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_is_the_same_afterwards_even_after_an_error(name, monkeypatch):
    model = Transformer.wrap(copy.deepcopy(wrapped(name).model), check=False)
    model.model.get_input_embeddings().weight.requires_grad_(False)
    before = {
        n: (p, p.detach().clone(), p.requires_grad) for n, p in model.model.named_parameters()
    }
    left = traces(model.model)

    def is_untouched() -> bool:
        now = dict(model.model.named_parameters())
        same = all(
            now[n] is p and torch.equal(now[n], bits) and now[n].requires_grad == flag
            for n, (p, bits, flag) in before.items()
        )
        no_gradients = all(p.grad is None for p in now.values())
        return (
            same
            and no_gradients
            and traces(model.model) == left
            and not (hooks_of(model.model)._modules)
        )

    for how in ("full", "layer-causal"):
        delta = learn(model, demonstrations(), how=how, learning_rate=0.1).delta
        assert is_untouched()
        with pytest.raises(NotFinite), torch.no_grad():
            learn(model, demonstrations(), how=how, learning_rate=1e300)
        assert is_untouched()
        with pytest.raises(BadSettings), model.edit(ApplyDelta(delta)):
            learn(model, demonstrations(), how=how, learning_rate=0.1)  # one delta is in force
        assert is_untouched()


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        (name, attention)
        for name in FAMILIES
        for attention in ("sdpa", "eager")
        if (name, attention) != ("gemma2", "sdpa")  # its scores are capped, which sdpa cannot do
    ],
)
def test_recorded_scores_are_those_of_an_explicit_computation(name, attention):
    model = wrapped(name, attn_implementation=attention)
    prompt = Prompt(ids(9, 1) + ids(4, 2), 4)
    (observation,) = observe(model, [prompt])
    from layerleap.models.hooks.attention import attention_wrapped_by

    seen = {}

    def around(function, module, query, key, *args, **options):
        seen[module] = query, key, options
        return function(module, query, key, *args, **options)

    with attention_wrapped_by(around), torch.no_grad():
        model.model(torch.tensor([prompt.ids]), use_cache=False)
    for scores, (query, key, options) in zip(observation.scores, seen.values(), strict=True):
        n_heads, shared = query.shape[1], query.shape[1] // key.shape[1]
        assert scores.shape == (n_heads, 4)
        for head in range(n_heads):
            for column, position in enumerate(range(9, 13)):
                q, k = query[0, head, -1], key[0, head // shared, position]
                score = float((q * k).sum()) * options["scaling"]
                if (cap := options.get("softcap")) is not None:
                    score = cap * float(torch.tanh(torch.tensor(score / cap)))
                assert float(scores[head, column]) == pytest.approx(score, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_scores_give_the_models_own_attention_weights(name):
    model = wrapped(
        name, attn_implementation="eager", **({} if name != "gemma2" else {"sliding_window": 64})
    )
    prompt = Prompt(ids(11, 4), 11)
    (observation,) = observe(model, [prompt])
    with torch.no_grad():
        weights = model.model(torch.tensor([prompt.ids]), output_attentions=True).attentions
    for scores, own in zip(observation.scores, weights, strict=True):
        torch.testing.assert_close(scores.softmax(-1), own[0, :, -1].double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_observed_position_is_the_one_that_predicts_the_answer(name):
    model = wrapped(name)
    prompts = [Prompt(ids(n, n), 3) for n in (5, 9, 5, 7)]
    seen = observe(model, prompts, labels=[7, 9, 11], tokens_per_batch=10)
    for prompt, observation in zip(prompts, seen, strict=True):
        with torch.no_grad():
            logits = model.model(torch.tensor([prompt.ids])).logits[0, -1]
        assert observation.top == int(logits.argmax())
        torch.testing.assert_close(observation.labels, logits.log_softmax(-1)[[7, 9, 11]])
        captured = model.capture(list(prompt.ids), sites=[(2, "attn.out")])
        torch.testing.assert_close(observation.attention[1], captured.sites[2, "attn.out"][0, -1])
        torch.testing.assert_close(observation.states[2], captured.states[2][0, -1])


def test_a_share_of_the_rows_has_the_same_gradient_on_average():
    model = wrapped("llama")
    exact = found(model, "layer-causal")
    n, total = 150, dict.fromkeys(exact.tensors, 0)
    for seed in range(n):
        part = found(model, "layer-causal", share=0.5, seed=seed)
        assert part.losses[model.n_layers] == exact.losses[model.n_layers]
        total = {
            parameter: total[parameter] + value / n for parameter, value in part.tensors.items()
        }
    single = found(model, "layer-causal", share=0.5)
    for parameter in choose(model).names:
        size = exact.tensors[parameter].norm()
        error = (total[parameter] - exact.tensors[parameter]).norm() / size
        if choose(model).blocks[parameter] == model.n_layers:  # where all rows count
            assert error < 1e-9
        else:
            assert (
                error < 0.2 < (single.tensors[parameter] - exact.tensors[parameter]).norm() / size
            )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_edit_of_the_same_module_is_in_force_with_a_delta(name):
    model = wrapped(name)
    path = f"{feed_forward(model, 2).down.path}.weight"
    delta = Delta.of(model, {path: torch.full_like(model.model.get_parameter(path), 0.01).detach()})
    batch, neuron = lesson(model, demonstrations(1)).inputs, AddNeuron(2, 3, 5.0)
    merged = Transformer.wrap(delta.merged(model), check=False)
    with torch.no_grad():
        with model.edit(ApplyDelta(delta), neuron):
            ours = model.model(**batch).logits
        with merged.edit(neuron):
            theirs = merged.model(**batch).logits
    assert torch.equal(ours, theirs)


def test_weights_may_be_asked_for_by_gradients_under_no_grad_or_inference_mode():
    model = wrapped("llama")
    chosen, batch = choose(model), lesson(model, demonstrations(1))
    own = values(model, chosen)
    plain = gradients(model, chosen, own, batch, how="full")
    with torch.inference_mode():
        inside = gradients(model, chosen, own, batch, how="full")
    assert all(torch.equal(inside.tensors[n], g) for n, g in plain.tensors.items())
