"""A lens says what the model would say if it stopped there."""

import html
import json
import re
from html.parser import HTMLParser

import pytest
import torch

from families import build
from layerleap.errors import BadSettings, BadText, WrongModel
from layerleap.lens.lens import Lens, chunks
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.fit import fit
from layerleap.maps.linear import LinearMap
from layerleap.maps.map import IdentityMap
from layerleap.models.transformer import Transformer
from tiny_models import sentences, tiny, tokenizer

TEXTS = {"llama": "the old man saw a red bird", "bert": "the old <mask> saw a red <mask>"}


@pytest.fixture(scope="module", params=["llama", "bert"])
def case(request):
    """A model, a bank of it, a text, and what Hugging Face says about it."""
    transformer = tiny(request.param)
    bank = fit(transformer, sentences(40), intercept=True)
    ids = transformer.tokenizer(TEXTS[request.param], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        output = transformer.model(ids, output_hidden_states=True)
    return request.param, transformer, bank, ids[0].tolist(), output


def head_of(name, model):
    if name == "llama":
        return lambda h: model.lm_head(model.model.norm(h))
    return model.cls


def probabilities(logits, k):
    actual = torch.softmax(logits.double(), -1).topk(k)
    return actual.indices, actual.values


def assert_reads(track, layer, logits, k=5):
    ids, values = probabilities(logits, k)
    assert torch.equal(track.ids[layer], ids)
    torch.testing.assert_close(track.probs[layer].double(), values, rtol=1e-4, atol=1e-6)


def test_the_last_layer_says_what_the_model_says(case):
    _, transformer, bank, ids, output = case
    readings = Lens(transformer, bank).read(ids, positions=range(len(ids)))
    for track in readings.tracks.values():
        assert_reads(track, transformer.n_layers, output.logits[0])
        assert track.agrees[-1].all()
        assert track.kl[-1].max() < 1e-5
        floor = -torch.log_softmax(output.logits[0].double(), -1).amax(-1)
        torch.testing.assert_close(track.surprisal[-1].double(), floor, rtol=1e-4, atol=1e-5)


def test_the_id_track_is_the_logit_lens_made_by_hand(case):
    name, transformer, bank, ids, output = case
    readings = Lens(transformer, bank).read(ids, positions=range(len(ids)))
    head = head_of(name, transformer.model)
    for layer in range(transformer.n_layers):  # Hugging Face's last state is past the norm
        with torch.inference_mode():
            assert_reads(readings.tracks["logit"], layer, head(output.hidden_states[layer][0]))


def test_the_mat_track_is_the_map_and_then_the_tail(case):
    name, transformer, bank, ids, output = case
    readings = bank.lens(transformer).read(ids, positions=range(len(ids)))
    head, last = head_of(name, transformer.model), transformer.n_layers
    for layer in range(last):
        h = output.hidden_states[layer][0]
        with torch.inference_mode():
            logits = head(h @ bank[layer, last].weight + bank[layer, last].bias)
        assert_reads(readings.tracks["linear"], layer, logits)
        own = output.logits[0].argmax(-1)
        assert torch.equal(readings.tracks["linear"].agrees[layer], logits.argmax(-1) == own)


def test_divergence_and_surprisal_are_torchs(case):
    name, transformer, bank, ids, output = case
    track = Lens(transformer, bank).read(ids, positions=range(len(ids))).tracks["logit"]
    log_p = torch.log_softmax(output.logits[0].double(), -1)
    for layer in range(transformer.n_layers):
        with torch.inference_mode():
            logits = head_of(name, transformer.model)(output.hidden_states[layer][0]).double()
        log_q = torch.log_softmax(logits, -1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        torch.testing.assert_close(track.kl[layer].double(), kl, rtol=1e-3, atol=1e-4)
        chosen = -log_p.gather(-1, logits.argmax(-1, keepdim=True))[:, 0]
        torch.testing.assert_close(track.surprisal[layer].double(), chosen, rtol=1e-3, atol=1e-4)


def test_a_text_is_read_like_its_token_ids(case):
    name, transformer, bank, ids, _ = case
    lens = Lens(transformer, bank)
    assert lens.read(TEXTS[name]).to_dict() == lens.read(ids).to_dict()
    assert lens.read(TEXTS[name]).tokens == [transformer.tokenizer.decode([i]) for i in ids]


def test_without_a_bank_only_the_logit_lens_is_read(case):
    name, transformer, *_ = case
    lens = Lens(transformer)
    assert lens.name == "logit"
    assert isinstance(lens.map(0), IdentityMap)
    assert list(lens.read(TEXTS[name]).tracks) == ["logit"]


def test_all_positions_are_read_unless_some_are_masked(case):
    name, transformer, bank, _ids, _ = case
    readings = Lens(transformer, bank).read(TEXTS[name])
    assert readings.positions == (list(range(7)) if name == "llama" else [3, 7])
    plain = Lens(transformer).read("the old man")
    assert plain.positions == list(range(len(plain.tokens)))


def test_a_mask_token_means_nothing_to_a_model_that_reads_forward():
    assert Lens(tiny("llama")).read("the <mask> sat").positions == [0, 1, 2]


def test_negative_positions_count_from_the_end(case):
    name, transformer, bank, ids, _ = case
    lens = Lens(transformer, bank)
    n = len(ids)
    expected = lens.read(TEXTS[name], positions=[0, n - 3, n - 1]).to_dict()
    assert lens.read(TEXTS[name], positions=[-1, -3, -1, -n]).to_dict() == expected
    readings = lens.read(TEXTS[name], positions=range(n))
    assert readings.at(-1) == readings.at(n - 1)
    assert len(readings.at(0)) == 2 * (transformer.n_layers + 1)


@pytest.mark.parametrize("position", [7, -8, 100])
def test_a_position_that_does_not_exist_is_refused(position):
    lens = Lens(tiny("llama"))
    with pytest.raises(BadSettings, match=f"position {position} does not exist.* has 7 tokens"):
        lens.read(TEXTS["llama"], positions=[0, position])
    with pytest.raises(BadSettings, match=f"position {position} does not exist"):
        lens.read(TEXTS["llama"]).at(position)


def test_no_position_at_all_is_refused():
    with pytest.raises(BadSettings, match="no position"):
        Lens(tiny("llama")).read("the cat", positions=[])


@pytest.mark.parametrize("text", ["", []])
def test_an_empty_text_is_refused(case, text):
    with pytest.raises(BadText, match=r"the text is empty|no text to read"):
        Lens(case[1]).read(text)


def test_no_text_at_all_is_refused(case):
    with pytest.raises(BadText, match="no text"):
        Lens(case[1]).read_batch([])


def test_a_text_longer_than_the_model_can_read_is_refused(case):
    with pytest.raises(BadText, match="at most 64"):
        Lens(case[1]).read([5] * 65)
    assert len(Lens(case[1]).read([5] * 64).tokens) == 64


@pytest.mark.parametrize("token", [61, -1])
def test_a_token_the_model_does_not_know_is_refused(case, token):
    with pytest.raises(BadText, match="0 to 60"):
        Lens(case[1]).read([5, token])


@pytest.mark.parametrize("top_k", [0, -1, 62])
def test_top_k_must_lie_within_the_vocabulary(case, top_k):
    with pytest.raises(BadSettings, match=f"top_k {top_k} is out of range; expected 1 to 61"):
        Lens(case[1]).read("the cat", top_k=top_k)


@pytest.mark.parametrize("top_k", [1, 61])
def test_top_k_tokens_are_kept(case, top_k):
    readings = Lens(case[1]).read("the cat", top_k=top_k)
    track = readings.tracks["logit"]
    assert track.ids.shape == (4, len(readings.positions), top_k)
    assert (track.probs[..., :-1] >= track.probs[..., 1:]).all()
    if top_k == 61:
        torch.testing.assert_close(track.probs.sum(-1), torch.ones(track.probs.shape[:2]))


def test_what_a_lens_gives_can_be_trained_on(case):
    _, transformer, bank, ids, output = case
    logits = Lens(transformer, bank).logits(output.hidden_states[1][0], 1)
    probe = torch.nn.Linear(61, 2)
    probe(logits).sum().backward()
    assert probe.weight.grad is not None
    track = Lens(transformer, bank).read(ids).tracks["linear"]
    assert not any(value.is_inference() for value in vars(track).values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t5", r"other is an encoder-decoder; expected a tuple \(source, target\)"),
        ("vit", "other reads images, sound or two texts at once"),
        ("whisper", "other reads images, sound or two texts at once"),
    ],
)
def test_a_model_that_reads_no_plain_text_is_refused_by_read(name, message):
    lens = Lens(Transformer.wrap(build(name), tokenizer(), name="other"))
    for text in ("the cat", [5, 6]):
        with pytest.raises(BadSettings, match=message):
            lens.read(text)
        with pytest.raises(BadSettings, match=message):
            lens.last_position(text)


def test_several_texts_tensors_and_tokenizer_batches_are_read(case):
    _, transformer, bank, *_ = case
    lens, texts = Lens(transformer, bank), ["the cat sat", "a big dog ran"]
    expected = [lens.read(text) for text in texts]
    batch = transformer.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    ids = [transformer.tokenizer(text)["input_ids"] for text in texts]
    for given in (texts, tuple(texts), batch, transformer.tokenizer(texts), ids):
        readings = lens.read(given)
        assert [r.tokens for r in readings] == [r.tokens for r in expected]
        for ours, theirs in zip(readings, expected, strict=True):
            kl, same = ours.tracks["linear"].kl, theirs.tracks["linear"].kl
            assert torch.allclose(kl, same, atol=1e-4)
    assert lens.read(torch.tensor(ids[0])).tokens == expected[0].tokens
    for wrong in ([["a"], 3], [None], {"pixel_values": 1}, 3, None):
        with pytest.raises(BadText, match="expected"):
            lens.read(wrong)


def test_a_model_that_is_not_wrapped_is_refused_with_what_to_do(case):
    _, transformer, bank, *_ = case
    with pytest.raises(BadSettings, match=r"wrap it with layerleap\.load\(model\)"):
        bank.lens(transformer.model)


def test_half_a_surrogate_pair_is_refused_with_its_place(case):
    with pytest.raises(BadText, match=r"character 4 of the text .*U\+D83D"):
        Lens(case[1]).read("the \ud83d cat")


def test_the_last_position_is_the_last_token_or_the_last_mask(case):
    name, transformer, _, ids, _ = case
    lens = Lens(transformer)
    assert lens.last_position(TEXTS[name]) == len(ids) - (1 if name == "llama" else 2)
    assert lens.last_position("the cat") == lens.read("the cat").positions[-1]


def test_a_model_without_a_tokenizer_reads_token_ids():
    lens = Lens(Transformer.wrap(build("llama"), name="bare"))
    assert lens.read([5, 6, 7]).tokens == ["5", "6", "7"]
    with pytest.raises(BadText, match="bare has no tokenizer; give token ids"):
        lens.read("the cat")


def test_a_lens_of_another_model_is_refused(case):
    _, _, bank, *_ = case
    with pytest.raises(WrongModel):
        Lens(tiny("llama", seed=3), bank)
    with pytest.raises(WrongModel):
        bank.lens(tiny("gpt2"))


def test_a_layer_that_does_not_exist_is_refused(case):
    _, transformer, bank, *_ = case
    with pytest.raises(BadSettings, match="no map from layer 9"):
        Lens(transformer, bank).logits(torch.zeros(1, 24), 9)


def test_logits_of_rows_are_those_of_the_reading(case):
    _, transformer, bank, ids, output = case
    lens = Lens(transformer, bank)
    logits = lens.logits(output.hidden_states[1][0], 1)
    assert logits.shape == (len(ids), 61)
    track = lens.read(ids, positions=range(len(ids)), top_k=1).tracks["linear"]
    assert torch.equal(track.ids[1, :, 0], logits.argmax(-1))


@pytest.mark.parametrize("entries", [1, 61, 61 * 3, 2**23])
def test_readings_do_not_depend_on_how_rows_are_cut(case, monkeypatch, entries):
    _name, transformer, bank, ids, _ = case
    lens = Lens(transformer, bank)
    whole = lens.read(ids, positions=range(len(ids)))
    monkeypatch.setattr("layerleap.memory.LOGITS", entries)
    cut = lens.read(ids, positions=range(len(ids)))
    for key, track in whole.tracks.items():
        assert torch.equal(cut.tracks[key].ids, track.ids)
        assert torch.equal(cut.tracks[key].agrees, track.agrees)
        for measure in ("probs", "kl", "surprisal"):
            torch.testing.assert_close(
                getattr(cut.tracks[key], measure), getattr(track, measure), rtol=1e-4, atol=1e-5
            )


def test_chunks_cover_every_row_once(monkeypatch):
    monkeypatch.setattr("layerleap.memory.LOGITS", 10)
    for n in range(8):
        assert [row for cut in chunks(n, 4) for row in range(n)[cut]] == list(range(n))
    assert [cut.stop - cut.start for cut in chunks(3, 100)] == [1, 1, 1]


def test_texts_of_a_batch_are_read_as_if_alone(case):
    _, transformer, bank, *_ = case
    lens = Lens(transformer, bank)
    texts = ["the cat", "a red bird sang and then it slept", "old"]
    together = lens.read_batch(texts, top_k=3)
    for text, actual in zip(texts, together, strict=True):
        alone = lens.read(text, top_k=3)
        assert actual.tokens == alone.tokens
        assert actual.positions == alone.positions
        for key, track in alone.tracks.items():
            assert torch.equal(actual.tracks[key].ids, track.ids)
            torch.testing.assert_close(actual.tracks[key].kl, track.kl, rtol=1e-3, atol=1e-4)


def test_reading_leaves_the_model_as_it_was(case):
    name, transformer, bank, *_ = case
    before = {path: len(m._forward_hooks) for path, m in transformer.model.named_modules()}
    Lens(transformer, bank).read(TEXTS[name])
    assert {p: len(m._forward_hooks) for p, m in transformer.model.named_modules()} == before


def test_rows_are_plain_and_complete(case):
    _name, transformer, bank, ids, _ = case
    readings = Lens(transformer, bank).read(ids, positions=[2, 4], top_k=3)
    rows = list(readings.rows())
    assert len(rows) == 2 * 2 * (transformer.n_layers + 1)
    first = rows[0]
    assert list(first) == [
        *("map", "position", "token", "layer", "top", "agrees", "kl", "surprisal")
    ]
    assert first["token"] == readings.tokens[first["position"]]
    assert [set(best) for best in first["top"]] == [{"id", "token", "prob"}] * 3
    assert first["top"][0]["token"] == transformer.tokenizer.decode([first["top"][0]["id"]])


def test_readings_survive_json(case):
    name, transformer, bank, *_ = case
    actual = Lens(transformer, bank).read(TEXTS[name]).to_dict()
    assert json.loads(json.dumps(actual, allow_nan=False)) == actual
    assert actual["n_layers"] == 3


def test_readings_become_a_data_frame(case):
    name, transformer, bank, *_ = case
    readings = Lens(transformer, bank).read(TEXTS[name], top_k=4)
    frame = readings.to_pandas()
    assert list(frame.columns) == [
        *("map", "position", "token", "layer", "rank", "top_token", "prob"),
        *("agrees", "kl", "surprisal"),
    ]
    assert len(frame) == 2 * len(readings.positions) * 4 * 4
    assert set(frame["rank"]) == {1, 2, 3, 4}
    at = frame.query("map == 'linear' and layer == 3 and rank == 1")
    assert at["agrees"].all()
    best = readings.tracks["linear"].probs[3, :, 0]
    assert at["prob"].tolist() == pytest.approx(best.tolist())


def test_a_reading_says_what_it_is(case):
    name, transformer, bank, *_ = case
    shown = repr(Lens(transformer, bank).read(TEXTS[name], positions=[1]))
    assert shown == "Readings(1 positions, layers 0 to 3, logit and linear)"


class Page(HTMLParser):
    """Counts tags, collects text, and notes whatever would be fetched or run."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.outside, self.open = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href") or name.startswith("on") or "url(" in (value or ""):
                self.outside.append((tag, name, value))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_notebook_table_is_well_formed_and_needs_nothing_else(case):
    name, transformer, bank, *_ = case
    readings = Lens(transformer, bank).read(TEXTS[name])
    text = readings._repr_html_()
    page = Page(text)
    assert page.open == []
    assert page.outside == []
    assert "script" not in page.tags
    assert "@import" not in text
    assert page.tags["table"] == 2
    assert page.tags["td"] == 2 * 4 * len(readings.positions)
    layers = re.findall(r"<tr><th>(\d)</th>", text)
    assert layers == ["3", "2", "1", "0"] * 2  # the last layer on top
    agreeing = sum(int(track.agrees.sum()) for track in readings.tracks.values())
    assert text.count('class="agrees"') == agreeing


def test_tokens_cannot_break_out_of_the_table(case):
    _, transformer, bank, ids, _ = case
    nasty = ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "&lt;", " \n", "\t"]

    class Nasty:
        mask_token_id, pad_token_id = None, 0

        def decode(self, ids):
            return nasty[ids[0] % len(nasty)]

    evil = Transformer(**{**vars_of(transformer), "tokenizer": Nasty()})
    readings = Lens(evil, bank).read(ids, positions=range(len(ids)), top_k=5)
    text = readings._repr_html_()
    page = Page(text)
    assert page.outside == []
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert html.escape(nasty[0]) in text
    assert "\u23ce" in text or "\u2423" in text


def vars_of(transformer):
    names = ("model", "tokenizer", "identity", "blocks", "tail", "anatomy", "kind")
    return {name: getattr(transformer, name) for name in (*names, "d_model", "d_vocab")}


def test_a_bank_that_lacks_layers_says_so(case):
    name, transformer, bank, *_ = case
    lacking = ShortcutBank(
        [LinearMap(0, 3, weight=torch.eye(24))],
        model=bank.model,
        n_layers=3,
        d_model=24,
    )
    with pytest.raises(BadSettings, match="no map from layer 1 to layer 3"):
        Lens(transformer, lacking).read(TEXTS[name])


def test_a_model_in_bfloat16_is_read_in_its_own_dtype():
    model = build("llama").to(torch.bfloat16)
    transformer = Transformer.wrap(model, tokenizer(), name="tiny-llama")
    bank = fit(transformer, sentences(30))
    readings = Lens(transformer, bank).read(TEXTS["llama"])
    assert readings.tracks["linear"].agrees[-1].all()
    assert readings.tracks["linear"].probs.dtype == torch.float32
    json.dumps(readings.to_dict(), allow_nan=False)
