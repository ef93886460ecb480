"""Gradient descent on demonstrations: steps, choices and what is refused."""

from dataclasses import replace

import pytest
import torch

from families import build
from layerleap.act.edits import ApplyDelta
from layerleap.act.learning import descent
from layerleap.act.learning.delta import Delta
from layerleap.act.learning.descent import learn
from layerleap.act.learning.gradients import gradients
from layerleap.act.learning.lessons import Demonstration, lesson
from layerleap.act.learning.observe import Prompt, observe
from layerleap.act.learning.parameters import choose
from layerleap.errors import BadSettings, BadText, ModelRefused, NotFinite, WrongModel
from layerleap.lens.lens import Lens
from layerleap.models.transformer import Transformer
from learning_cases import demonstrations, ids, values
from tiny_models import tiny


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def test_learning_is_plain_steps_in_the_order_given(model):
    given, rate = demonstrations(3), 0.2
    chosen = choose(model)
    now = values(model, chosen)
    for one in given:
        found = gradients(model, chosen, now, lesson(model, [one]), how="full")
        now = {name: value - rate * found.tensors[name] for name, value in now.items()}
    learned = learn(model, given, learning_rate=rate)
    for name, value in learned.delta.values(model).items():
        torch.testing.assert_close(value, now[name], rtol=1e-5, atol=1e-6)
    other = learn(model, given[::-1], learning_rate=rate).delta
    assert (learned.delta - other).norm() > 1e-5 * learned.delta.norm()
    assert len(learned.losses) == 3


def test_two_halves_are_one_pass_even_if_rows_are_drawn(model):
    given = demonstrations(4)
    how = {"learning_rate": 0.2, "how": "layer-causal", "share": 0.5}
    whole = learn(model, given, **how).delta
    half = learn(model, given[:2], **how).delta
    both = learn(model, given[2:], start=half, **how).delta
    assert all(torch.equal(both.tensors[name], one) for name, one in whole.tensors.items())
    assert both.settings["demonstrations"] == whole.settings["demonstrations"] == 4


@pytest.mark.parametrize("how", ["full", "layer-causal"])
def test_a_demonstration_seen_often_is_learned(model, how):
    learned = learn(model, demonstrations(1) * 12, how=how, learning_rate=0.5)
    last = model.n_layers
    assert learned.losses[-1][last] < learned.losses[0][last] - 0.2
    assert set(learned.losses[0]) == ({last} if how == "full" else {1, 2, 3})


def test_only_the_answer_counts_where_that_is_asked_for(model):
    one = Demonstration(ids(8, 1), n_answer=2)
    whole, answer = lesson(model, [one]), lesson(model, [one], "answer")
    assert whole.targets.tolist() == list(one.ids[1:])
    assert answer.targets.tolist() == list(one.ids[-2:])
    assert answer.keep.nonzero()[:, 1].tolist() == [5, 6]
    assert whole.weights.sum() == pytest.approx(1)
    assert answer.weights.tolist() == [0.5, 0.5]
    with torch.no_grad():
        log_p = model.model(torch.tensor([one.ids])).logits[0].log_softmax(-1)
    expected = -(log_p[5, one.ids[6]] + log_p[6, one.ids[7]]).item() / 2
    loss = learn(model, [one], learning_rate=0.1, tokens="answer").losses[0][model.n_layers]
    assert loss == pytest.approx(expected, rel=1e-5)


def test_parameters_are_chosen_by_words_or_patterns(model):
    everything = [name for name, _ in model.model.named_parameters()]
    assert list(choose(model, "all").names) == everything
    inside = [name for name in everything if ".layers." in name]
    assert list(choose(model, "blocks").names) == inside
    assert list(choose(model, "*.mlp.*").names) == [name for name in inside if ".mlp." in name]
    both = choose(model, ["keys", "*.down_proj.weight"])
    assert {name.split(".")[-2] for name in both.names} == {"k_proj", "down_proj"}
    kinds = {
        word: {name.split(".")[-2] for name in choose(model, word).names}
        for word in ("keys-values", "queries", "keys", "values", "outputs")
    }
    assert kinds == {
        "keys-values": {"k_proj", "v_proj"},
        "queries": {"q_proj"},
        "keys": {"k_proj"},
        "values": {"v_proj"},
        "outputs": {"o_proj"},
    }
    assert choose(model).of_block(2) == (
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
    )
    assert choose(model, "all").of_block(0)[0] == "model.embed_tokens.weight"


def test_parts_of_a_fused_matrix_are_joined():
    model = Transformer.wrap(build("gpt2"))
    keys, both = choose(model, "keys"), choose(model, ["queries", "keys", "values"])
    name = "transformer.h.0.attn.c_attn.weight"
    assert int(keys.masks[name].sum()) == 24 * 24
    assert both.masks[name].all()
    assert choose(model, ["keys", "*.c_attn.*"]).masks[name] is None


def test_a_tied_parameter_is_found_by_each_of_its_names():
    model = Transformer.wrap(build("gpt2"))
    assert choose(model, "lm_head.weight").names == ("transformer.wte.weight",)


def test_an_embedding_without_a_head_learns_nothing_in_layer_causal_learning():
    model = Transformer.wrap(build("llama", tie_word_embeddings=False))
    both = ["model.embed_tokens.weight", "keys-values"]
    causal = learn(model, demonstrations(), how="layer-causal", learning_rate=0.1, parameters=both)
    assert not causal.delta.tensors["model.embed_tokens.weight"].any()
    plain = learn(model, demonstrations(), learning_rate=0.1, parameters=both)
    assert plain.delta.tensors["model.embed_tokens.weight"].any()
    with pytest.raises(BadSettings, match="none of the chosen parameters"):
        learn(model, demonstrations(), how="layer-causal", learning_rate=0.1, parameters=both[0])


def test_the_same_call_learns_the_same_bits(model):
    first, second = (
        learn(model, demonstrations(), how="layer-causal", learning_rate=0.1, share=0.5, seed=3)
        for _ in range(2)
    )
    for name, value in first.delta.tensors.items():
        assert torch.equal(value, second.delta.tensors[name])
    assert first.losses == second.losses


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; expected a number above 0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"how": "layer_causal"}, "did you mean 'layer-causal'"),
        ({"tokens": "answers"}, "did you mean 'answer'"),
        (
            {"parameters": "k_proj"},
            "no parameter of tiny-llama matches 'k_proj'; expected one of "
            "keys-values, .*a pattern of names such as '\\*.self_attn.q_proj.weight'",
        ),
        ({"parameters": []}, "no parameters chosen"),
        ({"share": 0.0}, "share is 0.0"),
        ({"share": 0.5}, "for how='layer-causal' alone"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(model, options, message):
    with pytest.raises(BadSettings, match=message):
        learn(model, demonstrations(), **{"learning_rate": 0.1, **options})


def test_bad_demonstrations_are_refused_in_one_sentence(model):
    with pytest.raises(BadText, match="there are no demonstrations"):
        learn(model, [], learning_rate=0.1)
    with pytest.raises(BadText, match="has 1 tokens; expected 2 or more"):
        Demonstration((5,))
    with pytest.raises(BadSettings, match="n_answer is 3; expected 1 to 2"):
        Demonstration((5, 6, 7), 3)
    with pytest.raises(BadText, match="has 70 tokens; tiny-llama reads at most 64"):
        learn(model, [Demonstration(ids(70, 0))], learning_rate=0.1)


@pytest.mark.parametrize(
    ("name", "kind"), [("bert", "a masked-token model"), ("bart", "an encoder-decoder")]
)
def test_models_that_do_not_predict_the_next_token_are_refused(name, kind):
    model = Transformer.wrap(build(name))
    with pytest.raises(ModelRefused, match=f"is {kind}; learning here needs a decoder"):
        learn(model, demonstrations(), learning_rate=0.1)


def test_a_model_whose_keys_cannot_be_verified_asks_for_a_pattern():
    model = Transformer.wrap(build("bloom"))
    with pytest.raises(ModelRefused, match="attention interface"):
        learn(model, demonstrations(), learning_rate=0.1)
    learned = learn(
        model, demonstrations(), how="layer-causal", learning_rate=0.1, parameters="*.dense.*"
    )
    assert learned.delta.norm() > 0


@pytest.mark.parametrize("how", ["full", "layer-causal"])
def test_a_last_step_that_ends_in_infinity_is_refused(model, how, monkeypatch):
    def steep(*args, **options):
        found = gradients(*args, **options)
        tensors = {name: value * 1e30 for name, value in found.tensors.items()}
        return replace(found, tensors=tensors)

    monkeypatch.setattr(descent, "gradients", steep)
    with pytest.raises(NotFinite, match="after the last step; lower the learning rate"):
        learn(model, demonstrations(1), learning_rate=1e30, how=how)


def test_a_learning_rate_that_float32_cannot_hold_is_refused(model):
    with pytest.raises(BadSettings, match=r"learning_rate is 1e\+300; expected at most 3.4e\+38"):
        learn(model, demonstrations(1), learning_rate=1e300)


def test_states_that_are_not_finite_are_not_observed(model):
    delta = learn(model, demonstrations(1), learning_rate=0.1).delta
    broken = Delta.of(model, {n: torch.full_like(t, 3e38) for n, t in delta.tensors.items()})
    with (
        model.edit(ApplyDelta(broken)),
        pytest.raises(NotFinite, match=r"layer \d are NaN or infinite.*lower learning rate"),
    ):
        observe(model, [Prompt(ids(5, 0), 5)])


def test_a_lens_of_another_model_is_refused(model):
    other = tiny("llama", seed=5)
    with pytest.raises(WrongModel, match=r"the lens reads tiny-llama.*make a lens of this model"):
        learn(model, demonstrations(1), 0.1, how="layer-causal", lens=Lens(other))
    same = Transformer.wrap(model.model, model.tokenizer, check=False)
    assert learn(model, demonstrations(1), 0.1, how="layer-causal", lens=Lens(same)).losses
