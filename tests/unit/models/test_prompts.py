"""What a user may give as a prompt, and that every verb understands it alike."""

import numpy as np
import pytest
import torch

import layerleap as ll
from contract_bank import bank_of
from families import build
from layerleap.act.debug.debugger import Debugger
from layerleap.errors import BadSettings, BadText
from layerleap.models.prompts import encode, several
from layerleap.models.transformer import Transformer
from tiny_models import spelling, tiny, tokenizer

TEMPLATE = (
    "{% for m in messages %}<bos> {{ m['role'] }} {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<bos> assistant{% endif %}"
)
CHAT = [{"role": "user", "content": "the cat"}]
PROMPTS = ["the cat sat", "a dog", "it was big and red and old"]


def chatting() -> Transformer:
    """A model whose tokenizer adds special tokens of its own to plain texts."""
    own = tokenizer("masked-token", side="left")
    own.chat_template = TEMPLATE
    model = Transformer.wrap(build("llama", 0), own, name="chatting")
    model.model.generation_config.eos_token_id = None
    model.model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="module")
def chat():
    return chatting()


@pytest.fixture(scope="module")
def bare():
    """A model without a tokenizer, which reads and writes token ids."""
    model = Transformer.wrap(build("llama", 0), name="bare")
    model.model.generation_config.eos_token_id = None
    model.model.generation_config.pad_token_id = 0
    return model


def ids_of(text: str) -> list[int]:
    return tokenizer().convert_tokens_to_ids(text.split())


def test_a_chat_ends_where_the_answer_begins_and_special_tokens_are_not_doubled(chat):
    assert encode(chat, CHAT) == ids_of("<bos> <unk> the cat <eos> <bos> <unk>")
    assert encode(chat, "the cat") == ids_of("<bos> the cat <eos>")  # a plain text gets its own


def test_an_answer_that_has_begun_is_continued(chat):
    begun = [*CHAT, {"role": "assistant", "content": "a dog"}]
    assert encode(chat, begun)[-4:] == ids_of("<bos> <unk> a dog")


def test_every_verb_takes_chat_messages(chat):
    ids = encode(chat, CHAT)
    edits = ["L2.N3=9"]
    assert len(ll.read(chat, CHAT, bank=None).tokens) == len(ids)
    assert ll.generate(chat, CHAT, bank=None, max_new_tokens=3).prompt_ids == ids
    assert len(ll.neurons(chat).dominant(CHAT).tokens) == len(ids)
    assert len(ll.effect(chat, CHAT, edits).tokens) == len(ids)
    assert len(ll.Lens(chat).saturation(CHAT).readings.tokens) == len(ids)
    assert chat.capture(CHAT).states[0].shape[:2] == (1, len(ids))
    assert Debugger(chat).encode(CHAT) == ids


def test_the_chat_option_of_generate_is_a_chat_with_one_message(chat):
    options = {"bank": None, "max_new_tokens": 3}
    one = ll.generate(chat, "the cat", chat=True, **options)
    assert one.prompt_ids == encode(chat, CHAT)
    assert one.ids == ll.generate(chat, CHAT, **options).ids


def test_a_tokenizer_without_a_template_and_bad_messages_are_refused_in_words(chat, bare):
    with pytest.raises(BadSettings, match="tiny-llama has no chat template, so chat messages"):
        ll.read(tiny(), CHAT, bank=None)
    with pytest.raises(BadText, match="bare has no tokenizer; give token ids"):
        ll.generate(bare, CHAT, bank=None)
    with pytest.raises(BadText, match=r"a single message is not a chat; expected .*\[message\]"):
        chat.capture(CHAT[0])
    strict = chatting()
    strict.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadText, match=r"template of chatting refuses .*\(roles must alternate\)"):
        ll.read(strict, CHAT, bank=None)
    with pytest.raises(BadText, match="expected a text, chat messages"):
        ll.read(chat, [{"text": "the cat"}], bank=None)


@pytest.mark.parametrize("side", ["left", "right"])
def test_readings_of_several_prompts_are_those_of_each_alone(side, monkeypatch):
    model = tiny("gpt2", side=side)  # counts positions from the first column
    bank = bank_of(model)
    monkeypatch.setattr("layerleap.lens.lens.PASS_TOKENS", 14)  # two passes
    together = ll.read(model, PROMPTS, bank=bank)
    assert len(together) == 3
    for prompt, readings in zip(PROMPTS, together, strict=True):
        alone = ll.read(model, prompt, bank=bank)
        assert (readings.tokens, readings.positions) == (alone.tokens, alone.positions)
        for name, track in alone.tracks.items():
            own = readings.tracks[name]
            torch.testing.assert_close(own.kl, track.kl, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(own.probs, track.probs, rtol=1e-4, atol=1e-6)
            assert torch.equal(own.ids[..., 0], track.ids[..., 0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_several_prompts_are_continued_as_each_alone(side):
    model = tiny("llama", side=side)
    model.model.generation_config.eos_token_id = None
    model.model.generation_config.pad_token_id = 0
    bank = bank_of(model)
    exact, early = ll.decoder(bank), ll.decoder(bank, rule=ll.exits.Fixed(2))
    for decoder, edits in ((exact, ()), (early, ()), (exact, ["L2.N3=9@last"])):
        options = {"decoder": decoder, "edits": edits, "max_new_tokens": 6}
        together = ll.generate(model, PROMPTS, **options)
        alone = [ll.generate(model, prompt, **options) for prompt in PROMPTS]
        assert [one.ids for one in together] == [one.ids for one in alone]
        assert [one.exit_layers for one in together] == [one.exit_layers for one in alone]
        assert [one.text for one in together] == [one.text for one in alone]


def test_dominant_neurons_of_several_prompts_are_those_of_each_alone():
    neurons = ll.neurons(tiny())
    together = neurons.dominant(PROMPTS, top=2)
    assert [one.to_dict() for one in together] == [
        neurons.dominant(prompt, top=2).to_dict() for prompt in PROMPTS
    ]


def test_results_of_several_prompts_make_one_table_and_one_view():
    model = tiny()
    both = ll.read(model, PROMPTS[:2], bank=None)
    table = both.to_pandas()
    assert list(table.prompt.unique()) == [0, 1]
    assert len(table) == sum(len(one.to_pandas()) for one in both)
    assert both._repr_html_().count("<table") == 2
    assert [one["tokens"] for one in both.to_dict()] == [one.tokens for one in both]


def test_one_bad_prompt_of_several_is_named_by_its_number():
    model = tiny()
    bad = ["the cat", "a dog", ""]
    for verb in (
        lambda: ll.read(model, bad, bank=None),
        lambda: ll.generate(model, bad, bank=None),
        lambda: ll.neurons(model).dominant(bad),
        lambda: model.capture(bad),
    ):
        with pytest.raises(BadText, match=r"prompt 3 of 3: the .* is empty"):
            verb()
    with pytest.raises(BadSettings, match="prompt 2 of 3: position 2 does not exist"):
        ll.read(model, PROMPTS, bank=None, positions=[2])


def test_one_prompt_is_told_from_several():
    model = tiny()
    ids, messages = [7, 8, 9], [*CHAT, *CHAT]
    for one in ("the cat", ids, tuple(ids), torch.tensor(ids), np.array(ids), messages):
        assert several(model, one) is None, one
    for given, n in (
        (PROMPTS, 3),
        ([ids, ids], 2),
        (torch.tensor([ids, ids]), 2),
        (np.array([ids, ids]), 2),
        ([messages, messages], 2),
        (["the cat", ids, messages], 3),
        ((p for p in PROMPTS), 3),
        ({"input_ids": [ids, ids]}, 2),
    ):
        found = several(model, given)
        assert found is not None, given
        assert len(found) == n, given


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_a_matrix_of_token_ids_is_left_out(side):
    model = tiny()
    pad = model.tokenizer.pad_token_id
    rows = [[7, 8, 9, 10], [11, 12]]
    padding = [pad] * 2
    padded = torch.tensor([rows[0], padding + rows[1] if side == "left" else rows[1] + padding])
    assert several(model, padded) == rows
    last = model.n_layers
    alone = model.capture(torch.tensor(rows[1:])).states[last][0]
    together = model.capture(padded).states[last][1]
    kept = slice(2, None) if side == "left" else slice(None, 2)
    torch.testing.assert_close(together[kept], alone, rtol=1e-4, atol=1e-4)
    assert several(model, torch.tensor([[pad, pad]])) == [[pad, pad]]  # nothing would be left


def test_padding_that_may_be_the_end_of_a_text_is_read_or_refused():
    model = tiny()
    model.model.generation_config.pad_token_id = model.model.generation_config.eos_token_id = 3
    assert several(model, torch.tensor([[7, 8, 3], [7, 3, 8]])) == [[7, 8, 3], [7, 3, 8]]
    with pytest.raises(BadText, match=r"row 2 .* 2 times 3 at an end.*tokenizer's whole batch"):
        several(model, torch.tensor([[7, 8, 9], [7, 3, 3]]))


def test_a_model_without_a_tokenizer_reads_and_continues_token_ids(bare):
    ids = [7, 8, 9]
    for given in (ids, torch.tensor(ids), np.array(ids)):
        assert len(ll.read(bare, given, bank=None).tokens) == 3
        written = ll.generate(bare, given, bank=None, max_new_tokens=4)
        assert written.prompt_ids == ids
        assert len(written.ids) == 4
    own = bare.model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0].tolist()
    assert ids + written.ids == own
    assert written.text == " ".join(map(str, own))
    again = ll.generate(bare, ids, decoder="transformers", max_new_tokens=4)
    assert (again.ids, again.text) == (written.ids, written.text)
    with pytest.raises(BadText, match="bare has no tokenizer; give token ids"):
        ll.generate(bare, "the cat", bank=None)


def test_generation_stops_at_strings():
    model = spelling()
    own = model.tokenizer
    whole = ll.generate(model, "abc", decoder="transformers", max_new_tokens=12).continuation
    stop = whole[5:7]
    wanted = whole[: whole.index(stop) + 2]
    for decoder in ("transformers", ll.decoder(), ll.decoder(rule=ll.exits.Fixed(3))):
        for strings in (stop, ["000", stop]):
            options = {"decoder": decoder, "max_new_tokens": 12, "stop_strings": strings}
            assert ll.generate(model, "abc", **options).continuation == wanted
    ids = own("abc", return_tensors="pt").input_ids
    theirs = model.model.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        custom_generate=ll.decoder(stop_strings=stop, tokenizer=own),
    )
    assert own.decode(theirs[0]) == "abc" + wanted
    with pytest.raises(BadSettings, match="expected strings that are not empty"):
        ll.generate(model, "abc", bank=None, stop_strings=[""])
    with pytest.raises(BadSettings, match="stop_strings need a tokenizer"):
        ll.decoder(stop_strings=stop)
    with pytest.raises(BadSettings, match="cannot match stop strings with this tokenizer"):
        ll.generate(tiny(), "the cat", bank=None, stop_strings=["."])  # a vocabulary of words


def test_stop_strings_need_a_tokenizer(bare):
    with pytest.raises(BadText, match="bare has no tokenizer"):
        ll.generate(bare, [7, 8], bank=None, stop_strings=["."])


def test_edits_may_be_strings_wherever_edits_are_taken(empty_cache):
    model = tiny()
    value, text = ll.edits.parse_edit("L2.N3=9"), "the cat"
    options = {"bank": None, "max_new_tokens": 4}
    wanted = ll.generate(model, text, edits=[value], **options)
    for edits in (["L2.N3=9"], "L2.N3=9", ("L2.N3=9",), value):
        assert ll.generate(model, text, edits=edits, **options).ids == wanted.ids
        assert ll.effect(model, text, edits).edits == ["Set neuron 3 of block 2 to 9"]
    assert wanted.how["edits"] == str(value)
    with model.edit("L2.N3=9", ll.edits.ZeroNeuron(1, 1)) as report:
        inside = model.capture(text, layers=[2]).states[2]
    assert [entry.edit for entry in report] == [value, ll.edits.ZeroNeuron(1, 1)]
    with model.edit(value, ll.edits.ZeroNeuron(1, 1)):
        assert torch.equal(inside, model.capture(text, layers=[2]).states[2])
    with pytest.raises(BadSettings, match=r"cannot read the edit 'L2\.M3'"):
        ll.generate(model, text, edits=["L2.M3"], **options)
