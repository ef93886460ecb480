"""`ll.generate`: everything that the command line can do, in one call."""

import sys
from types import ModuleType

import pytest
import torch

import layerleap as ll
from contract_bank import bank_of
from layerleap.act.decode.decoding_stats import DecodingStats
from layerleap.act.decode.generate import Generation, Pieces
from layerleap.act.exits.rules import ExitPlan
from layerleap.errors import BadArtifact, BadSettings, BadText, CannotFetch
from layerleap.maps import fit as fit_module
from pages import HOSTILE, Page
from tiny_models import tiny

PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def llama():
    transformer = tiny("llama", num_hidden_layers=4)
    transformer.model.generation_config.eos_token_id = None
    transformer.model.generation_config.pad_token_id = 0
    return transformer, bank_of(transformer)


def own_ids(transformer, n):
    ids = transformer.tokenizer(PROMPT, return_tensors="pt").input_ids
    return transformer.model.generate(ids, max_new_tokens=n, do_sample=False)[0, ids.shape[1] :]


def test_a_prompt_alone_is_decoded_exactly_with_the_default_bank(llama, monkeypatch):
    transformer, bank = llama
    asked = []

    def default_bank(model, **_):
        asked.append(model)
        return bank

    monkeypatch.setattr(fit_module, "default_bank", default_bank)
    generation = ll.generate(transformer, PROMPT, max_new_tokens=9)
    assert asked == [transformer]
    assert generation.ids == own_ids(transformer, 9).tolist()
    assert generation.stats.exactness == "exact"
    assert generation.exit_layers == [4] * 9
    assert generation.text == str(generation) == PROMPT + generation.continuation


def test_a_rule_exits_early_and_the_agreement_is_measured(llama):
    transformer, bank = llama
    rule = ll.exits.Fixed(2)
    generation = ll.generate(transformer, PROMPT, bank=bank, rule=rule, max_new_tokens=9)
    assert generation.exit_layers == [4] + [2] * 8  # the prompt runs through all layers
    assert generation.stats.agreement is not None
    unmeasured = ll.generate(
        transformer, PROMPT, bank=bank, rule=rule, compare=False, max_new_tokens=9
    )
    assert unmeasured.stats.agreement is None
    assert unmeasured.ids == generation.ids


def test_an_early_text_says_where_it_departs_from_the_full_models(llama):
    """Agreement counts choices after the early text; the departure is from the full model's own."""
    transformer, bank = llama
    full = own_ids(transformer, 12).tolist()
    seen = set()
    for layer in (1, 2, 3):
        rule = ll.exits.Fixed(layer)
        made = ll.generate(transformer, PROMPT, bank=bank, rule=rule, max_new_tokens=12)
        common = next((n for n in range(12) if made.ids[n] != full[n]), None)
        seen.add(common)
        assert made.stats.departs_at == common
        assert made.stats.tokens_in_common == (12 if common is None else common)
        stored = made.to_dict()
        assert stored["departure"] == made.departure
        assert stored["stats"]["departs_at"] == common
        if common is not None:
            decode = transformer.tokenizer.decode
            assert made.departure == {
                "place": common,
                "token": made.tokens[common],
                "full_model": decode(full[common]),
            }
            assert f"the first {common} are the full model's own text" in str(made.stats)
    assert seen - {None}, "every text was the full model's own; choose another prompt"


def test_without_a_departure_the_text_is_said_to_be_the_same(llama):
    transformer, bank = llama
    never = ll.exits.TopProbability(1.0)
    made = ll.generate(transformer, PROMPT, bank=bank, rule=never, max_new_tokens=6)
    assert (made.departure, made.stats.tokens_in_common) == (None, 6)
    assert "the full model writes the same text" in str(made.stats)


def test_without_a_comparison_no_departure_is_claimed(llama):
    transformer, bank = llama
    made = ll.generate(
        transformer, PROMPT, bank=bank, rule=ll.exits.Fixed(1), compare=False, max_new_tokens=6
    )
    assert (made.departure, made.stats.tokens_in_common) == (None, None)
    assert "agreement not measured" in str(made.stats)


def test_an_unknown_policy_or_streamer_is_refused_before_a_bank_is_fitted(llama, monkeypatch):
    transformer, _ = llama
    monkeypatch.setattr(fit_module, "default_bank", lambda *_, **__: pytest.fail("fitted a bank"))
    with pytest.raises(BadSettings, match="'recompute', 'propagate', 'shortcut'"):
        ll.generate(transformer, PROMPT, policy="guess")
    with pytest.raises(BadSettings, match="on_token"):
        ll.generate(transformer, PROMPT, streamer=object())


class ByteTokenizer:
    """One token per byte of UTF-8, counting how many tokens it decodes."""

    decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_are_whole_characters_and_add_up_to_the_text():
    text = "Zwölf Boxkämpfer 漢字 🙂 end"
    written = Pieces(ByteTokenizer().decode)
    for token in text.encode():
        written.add(token)
    written.end()
    assert "".join(written.pieces) == text
    assert len(written.pieces) == len(text.encode())
    assert all("\ufffd" not in piece for piece in written.pieces)


def test_bytes_that_never_become_a_character_are_given_at_the_end():
    written = Pieces(ByteTokenizer().decode)
    for token in [65, 0xE6]:
        written.add(token)
    assert written.pieces == ["A", ""]
    written.end()
    assert written.pieces == ["A", "\ufffd"]


def test_pieces_keep_the_spaces_that_a_tokenizer_drops_at_the_start(llama):
    """Special tokens add nothing, and the word after them keeps its space."""

    def decode(ids):
        return "".join({1: " a", 2: " b", 3: ""}[token] for token in ids).lstrip()

    written = Pieces(decode)
    for token in [1, 3, 2, 3, 3, 1]:
        written.add(token)
    assert "".join(written.pieces) == "a b a"
    assert written.pieces == ["a", "", " b", "", "", " a"]


def test_the_first_piece_keeps_the_space_after_the_prompt():
    """As with SentencePiece, whose decoder drops the first space of what it is given."""

    def decode(ids):
        return "".join({1: " a", 2: " b"}[token] for token in ids).lstrip()

    written = Pieces(decode)
    written.put(torch.tensor([[2, 1]]))
    written.put(torch.tensor([2]))
    written.put(torch.tensor([1]))
    assert written.pieces == [" b", " a"]
    assert decode([2, 1]) + "".join(written.pieces) == decode([2, 1, 2, 1])


def test_prompt_and_new_text_are_what_the_tokenizer_decodes(llama):
    transformer, bank = llama
    generation = ll.generate(transformer, "the cat sat", bank=bank, max_new_tokens=5)
    whole = transformer.tokenizer.decode([*generation.prompt_ids, *generation.ids])
    assert generation.text == whole


def test_decoding_a_text_takes_time_in_proportion_to_its_length():
    work = {}
    for n in (200, 400):
        tokenizer = ByteTokenizer()
        written = Pieces(tokenizer.decode)
        for token in (b"word " * n)[:n]:
            written.add(token)
        work[n] = tokenizer.decoded
    assert work[400] <= 2.1 * work[200]


def test_a_plan_has_rule_layers_and_bank(llama, tmp_path):
    transformer, bank = llama
    bank.save_pretrained(tmp_path / "bank")
    plan = ExitPlan(ll.exits.Fixed(1), (3,), str(tmp_path / "bank"))
    plan.save(tmp_path / "plan.json")
    assert ExitPlan.load(tmp_path / "plan.json") == plan
    expected = ll.generate(
        transformer, PROMPT, bank=bank, rule=plan.rule, checks=[3], max_new_tokens=6
    )
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        generation = ll.generate(transformer, PROMPT, plan=given, max_new_tokens=6)
        assert generation.exit_layers == [4, 3, 3, 3, 3, 3]
        assert generation.ids == expected.ids
    moved = ExitPlan(plan.rule, plan.layers, "nowhere")
    again = ll.generate(transformer, PROMPT, plan=moved, bank=bank, max_new_tokens=6)
    assert again.ids == expected.ids


def test_a_plan_of_the_logit_lens_uses_no_bank(llama):
    transformer, bank = llama
    plan = ExitPlan(ll.exits.Fixed(1), (3,), None)
    expected = ll.generate(
        transformer, PROMPT, bank=None, rule=plan.rule, checks=[3], max_new_tokens=6
    )
    for given in ("default", bank):
        generation = ll.generate(transformer, PROMPT, plan=plan, bank=given, max_new_tokens=6)
        assert generation.ids == expected.ids


def test_a_plan_and_a_decoder_plug_into_the_librarys_generate(llama, tmp_path):
    transformer, bank = llama
    bank.save_pretrained(tmp_path / "bank")
    ExitPlan(ll.exits.Fixed(1), (2,), str(tmp_path / "bank")).save(tmp_path / "plan.json")
    early = ll.decoder(plan=tmp_path / "plan.json", transformer=transformer)
    ids = transformer.tokenizer(PROMPT, return_tensors="pt").input_ids
    transformer.model.generate(ids, custom_generate=early, max_new_tokens=4, do_sample=False)
    assert early.stats[0].layers == [4, 2, 2, 2]
    generation = ll.generate(transformer, PROMPT, decoder=early, max_new_tokens=4)
    assert generation.exit_layers == [4, 2, 2, 2]


def test_the_librarys_own_loop_is_a_decoder_too(llama):
    transformer, _ = llama
    generation = ll.generate(transformer, PROMPT, decoder="transformers", max_new_tokens=5)
    assert generation.ids == own_ids(transformer, 5).tolist()
    assert generation.exit_layers == [4] * 5


def test_every_token_is_reported_with_its_layer(llama):
    transformer, bank = llama
    pieces = []
    generation = ll.generate(
        transformer,
        PROMPT,
        bank=bank,
        rule=ll.exits.Fixed(2),
        max_new_tokens=5,
        on_token=lambda piece, layer: pieces.append((piece, layer)),
    )
    assert pieces == list(zip(generation.tokens, generation.exit_layers, strict=True))


def test_the_frame_has_a_line_per_token(llama):
    transformer, bank = llama
    generation = ll.generate(
        transformer, PROMPT, bank=bank, rule=ll.exits.Fixed(2), max_new_tokens=5
    )
    frame = generation.to_pandas()
    assert list(frame.columns) == ["token", "id", "exit_layer", "drafted"]
    assert frame["id"].tolist() == generation.ids
    assert frame["exit_layer"].tolist() == generation.exit_layers


def test_sampling_follows_the_seed(llama):
    transformer, bank = llama
    ids = []
    for _ in range(2):
        torch.manual_seed(4)
        ids.append(ll.generate(transformer, PROMPT, bank=bank, do_sample=True).ids)
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_new_tokens": 0}, BadSettings, "expected at least 1"),
        ({"chat": True}, BadSettings, "no chat template"),
        ({"rule": 0.98}, BadSettings, "rule is 0.98; expected an exit rule such as"),
        ({"bank": 3}, BadSettings, "bank is 3; expected a ShortcutBank or"),
        ({"decoder": "transformers", "rule": ll.exits.Never()}, BadSettings, "to the decoder"),
        (
            {"rule": ll.exits.Never(), "plan": ExitPlan(ll.exits.Never(), (), None)},
            BadSettings,
            "a plan has its own rule",
        ),
        ({"plan": ExitPlan(None, (), None)}, BadSettings, "never exit"),
        (
            {"decoder": "greedy"},
            BadSettings,
            "decoder is 'greedy'; expected a Decoder or 'transformers'",
        ),
        ({"plan": "nowhere.json"}, BadArtifact, "nowhere.json is missing"),
        ({"bank": "nowhere"}, CannotFetch, "nowhere"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(llama, options, error, words):
    with pytest.raises(error, match=words):
        ll.generate(llama[0], PROMPT, **{"bank": None, **options})


def test_a_masked_model_is_refused_before_a_bank_is_fitted(empty_cache):
    with pytest.raises(BadSettings, match="not a causal language model"):
        ll.generate(tiny("bert"), PROMPT)
    assert not empty_cache.exists()


def test_an_empty_prompt_is_refused(llama):
    with pytest.raises(BadText, match="the prompt is empty"):
        ll.generate(llama[0], " ", bank=None)


def test_a_file_that_is_not_a_plan_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text('{"rule": null}')
    with pytest.raises(BadArtifact, match="is not an exit plan"):
        ExitPlan.load(tmp_path / "plan.json")


def test_a_notebook_shows_the_text_as_it_grows(llama, monkeypatch):
    shown = []

    class Output:
        def update(self, generation):
            shown.append(generation)

    notebook = ModuleType("IPython.display")
    notebook.display = lambda first, display_id: shown.append(first) or Output()
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    transformer, bank = llama
    generation = ll.generate(transformer, PROMPT, bank=bank, live=True, max_new_tokens=6)
    assert shown[0].ids == []
    assert shown[-1] is generation
    lengths = [len(one.ids) for one in shown]
    assert lengths == sorted(lengths)
    assert all(Page(one._repr_html_()).all("script") == [] for one in shown)


def test_live_needs_a_notebook(llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(BadSettings, match="live=True needs a notebook"):
        ll.generate(llama[0], PROMPT, bank=None, live=True)


def test_a_generation_is_escaped_in_a_notebook():
    stats = DecodingStats(4, "approximate", 2, layers=[4, 1], drafted=[False, True])
    page = Page(Generation(HOSTILE, [HOSTILE, "b"], [1, 2], stats)._repr_html_())
    assert page.all("script") == []
    assert page.text.count(HOSTILE) == 2
    titles = [span["title"] for span in page.all("span") if "title" in span]
    assert titles == ["layer 4 of 4", "layer 1 of 4, drafted"]
