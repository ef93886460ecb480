"""Patchscopes: what the model writes equals a plain hook's result, and bad input is refused."""

import pytest
import torch
from tokenizers import Tokenizer, models as token_models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import layerleap as ll
from families import NEXT_TOKEN
from layerleap.act.patchscope import IDENTITY, _target
from layerleap.errors import BadSettings, BadText, ModelRefused
from tiny_models import sentences, tiny

PROMPT = "the cat sat on the mat"
TARGET = "the dog ran to the house"
TOKENS = 4
FAMILIES = ("llama", "gpt2", "gemma2", "neox", "opt")


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def written_with_a_plain_hook(model, layer, position, target, place, to):
    """Greedy tokens of transformers alone, with one state put in by a hook on the first pass."""
    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    state = model.model(ids, output_hidden_states=True).hidden_states[layer][0, position]

    def put_in(_, args, output=None):
        value = args[0] if output is None else output
        h = value[0] if isinstance(value, tuple) else value
        if h.shape[1] > 1:  # the prompt, not a token that was written
            h[0, place] = state
        return None if output is not None else (h, *args[1:])

    block = model.block(max(1, to))
    hook = block.register_forward_hook(put_in) if to else block.register_forward_pre_hook(put_in)
    try:
        ids = torch.tensor([target])
        out = model.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
    finally:
        hook.remove()
    return out[0, len(target) :].tolist()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in NEXT_TOKEN])
def test_what_is_written_is_that_of_a_plain_hook_at_every_layer(name):
    model = tiny(name)
    target, place = _target(model, "the dog {} to the house")
    scope = ll.patchscope(
        model, PROMPT, position=2, target="the dog {} to the house", n_tokens=TOKENS
    )
    assert any(row["ids"] for row in scope.lines)
    for row in scope.lines:
        layer = row["layer"]
        plain = written_with_a_plain_hook(model, layer, 2, target, place, layer)
        assert row["ids"] == plain[: len(row["ids"])], layer


def test_the_last_layer_is_read_only_where_its_state_can_act(model):
    last = model.n_layers
    inside = ll.patchscope(model, PROMPT, target="the dog {} the house")
    at_the_end = ll.patchscope(model, PROMPT, target="the dog {}")
    assert [row["layer"] for row in inside.lines] == list(range(last))
    assert [row["layer"] for row in at_the_end.lines] == list(range(last + 1))


@pytest.mark.parametrize("how", [{"layer": [0, 3]}, {"layer": 3}, {"target_layer": 3}])
def test_a_state_that_cannot_act_is_refused_if_asked_for(model, how):
    with pytest.raises(BadSettings, match="at layer 3, the last, changes nothing here"):
        ll.patchscope(model, PROMPT, target="the dog {} the house", **how)


def test_what_is_written_is_greedy_whatever_the_model_is_set_to():
    plain, changed = tiny("llama"), tiny("llama")
    settings = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": [7, 51]}
    changed.model.generation_config.update(**settings)
    before = changed.model.generation_config
    lines = [
        ll.patchscope(one, PROMPT, target=TARGET, n_tokens=8).lines for one in (plain, changed)
    ]
    assert lines[0] == lines[1]
    assert changed.model.generation_config is before


def test_a_token_of_id_0_can_end_a_text(model, monkeypatch):
    row = ll.patchscope(model, PROMPT, layer=1, target=TARGET).lines[0]
    renamed = tiny("llama")
    with torch.no_grad():  # what it writes first is now token 0
        head = renamed.model.lm_head.weight
        head[[0, row["ids"][0]]] = head[[row["ids"][0], 0]].clone()
    renamed = type(renamed).wrap(renamed.model, renamed.tokenizer)
    monkeypatch.setattr(renamed.model.generation_config, "eos_token_id", 0)
    assert ll.patchscope(renamed, PROMPT, layer=1, target=TARGET).lines[0]["ids"] == []


def test_what_follows_the_place_is_read_as_in_one_text(model, monkeypatch):
    words = ["<unk>", "\u2581the", "\u2581", "?", ",", "\u2581?", "\u2581dog"]
    backend = Tokenizer(
        token_models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token="<unk>")
    )
    # As SentencePiece does, a space is put in front of every text.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Punctuation()]
    )
    own = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    monkeypatch.setattr(model, "tokenizer", own)
    ids, place = _target(model, "the {}, dog")
    assert [words[one] for one in ids] == ["\u2581the", "\u2581", "?", ",", "\u2581dog"]
    assert place == 2


def test_layers_read_side_by_side_are_those_read_one_by_one(model, monkeypatch):
    whole = ll.patchscope(model, PROMPT, target=TARGET)
    monkeypatch.setattr("layerleap.act.patchscope.ROWS", 1)
    alone = ll.patchscope(model, PROMPT, target=TARGET)
    assert [row["text"] for row in whole.lines] == [row["text"] for row in alone.lines]


def test_a_state_put_back_where_it_came_from_changes_nothing(model):
    ids = torch.tensor([model.tokenizer(PROMPT)["input_ids"]])
    out = model.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
    )
    scope = ll.patchscope(model, PROMPT, target=PROMPT, n_tokens=TOKENS)
    assert all(row["ids"] == out[0, ids.shape[1] :].tolist() for row in scope.lines)


def test_the_last_state_at_the_last_place_says_what_the_model_says(model):
    with torch.no_grad():
        logits = model.model(torch.tensor([model.tokenizer(PROMPT)["input_ids"]])).logits[0, -1]
    scope = ll.patchscope(model, PROMPT, layer=model.n_layers, target=TARGET)
    row = scope.lines[0]
    assert row["prob"] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)
    assert row["token"] == row["lens"]


def test_a_linear_map_takes_the_state_to_the_target_layer(model):
    bank = ll.fit(model, sentences(40), pairs="all", evaluate=False)
    last = model.n_layers
    scope = ll.patchscope(
        model, PROMPT, layer=[0, 1], target=TARGET, target_layer=last, map="linear", bank=bank
    )
    states = model.capture(PROMPT, layers=[0, 1]).states
    for row in scope.lines:
        mapped = bank[row["layer"], last](states[row["layer"]][0, -1:])
        probs = model.logits(mapped).detach().softmax(-1)
        assert row["target_layer"] == last
        assert row["prob"] == pytest.approx(float(probs.max()), rel=1e-4)


def test_the_default_target_holds_the_place_once_and_ends_after_it():
    assert IDENTITY.count("{}") == 1
    assert IDENTITY.endswith("{} ->")


def test_a_target_without_a_place_takes_the_state_at_its_last_token(model):
    ids, place = _target(model, TARGET)
    assert place == len(ids) - 1


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"position": 99}, BadText, "position 99 is outside the prompt of 6 tokens"),
        ({"position": -7}, BadText, "expected -6 to 5"),
        ({"layer": 99}, BadSettings, "layer 99 does not exist"),
        ({"layer": []}, BadSettings, "no layers given"),
        ({"target": "{} and {}"}, BadText, "more than once"),
        ({"target_layer": 99}, BadSettings, "layer 99 does not exist"),
        ({"map": "tuned"}, BadSettings, "expected one of 'none', 'linear'"),
        ({"map": "linear"}, BadSettings, "takes a bank and a target_layer"),
        ({"n_tokens": 0}, BadSettings, "n_tokens is 0"),
        (
            {"n_tokens": 63},
            BadText,
            "target and written text have 65 tokens; this model reads at most 64",
        ),
        ({"target": "the cat " * 40}, BadText, "this model reads at most 64"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(model, how, error, words):
    with pytest.raises(error, match=words):
        ll.patchscope(model, PROMPT, **{"target": "the dog ran", **how})


def test_a_prompt_too_long_is_refused_with_its_length(model):
    with pytest.raises(BadText, match="has 80 tokens; this model reads at most 64"):
        ll.patchscope(model, "the cat " * 40)


def test_a_model_in_training_mode_is_refused():
    model = tiny("gpt2")
    model.model.train()
    with pytest.raises(ModelRefused, match="training mode"):
        ll.patchscope(model, PROMPT)


def test_a_state_is_not_mapped_backwards(model):
    bank = ll.fit(model, sentences(40), pairs="all", evaluate=False)
    with pytest.raises(BadSettings, match=r"layers \[2\] cannot be mapped to layer 1"):
        ll.patchscope(model, PROMPT, layer=2, target_layer=1, map="linear", bank=bank)


def test_a_bank_without_the_map_is_refused_before_anything_runs(model):
    bank = ll.fit(model, sentences(40), evaluate=False)
    with pytest.raises(BadSettings, match="no map from layer 0 to layer 1"):
        ll.patchscope(model, PROMPT, layer=0, target_layer=1, map="linear", bank=bank)


def test_a_model_that_does_not_write_is_refused():
    with pytest.raises(ModelRefused, match="does not write text"):
        ll.patchscope(tiny("bert"), "the [MASK] sat")


def test_an_encoder_decoder_is_refused():
    with pytest.raises(ModelRefused, match="is an encoder-decoder, which has no patchscope here"):
        ll.patchscope(tiny("t5"), "the cat sat")
