"""Encoder-decoders of texts: pairs from files and tuples, fitted and read."""

import json
from pathlib import Path

import pytest
import torch

import layerleap as ll
from families import build
from layerleap.errors import BadSettings, BadText
from layerleap.lens.lens import Lens
from layerleap.models.inputs import encode_pair
from layerleap.models.transformer import Transformer
from layerleap.stream import documents
from layerleap.stream.examples import Sampling, iter_examples
from layerleap.stream.text_pairs import ASK, iter_pairs
from tiny_models import sentences, tokenizer

PAIRS = [(text, " ".join(reversed(text.split()))) for text in sentences(40)]


def translator(name: str) -> Transformer:
    return Transformer.wrap(build(name), tokenizer("masked-token"), name=f"tiny-{name}")


def test_pairs_are_the_same_from_tuples_tsv_and_json_lines(tmp_path: Path):
    tsv, lines, named = (tmp_path / name for name in ("pairs.tsv", "pairs.jsonl", "named.jsonl"))
    tsv.write_text("\n".join("\t".join(pair) for pair in PAIRS), "utf8")
    records = [dict(zip(("source", "target"), pair, strict=True)) for pair in PAIRS]
    lines.write_text("\n".join(map(json.dumps, records)), "utf8")
    named.write_text("\n".join(json.dumps({"en": s, "de": t}) for s, t in PAIRS), "utf8")
    expected = list(iter_pairs(PAIRS))
    assert [(document.text, document.target) for document in expected] == PAIRS
    assert list(iter_pairs(str(tsv))) == expected
    assert list(iter_pairs(lines, field="text")) == expected  # the default of `Sampling.field`
    assert list(iter_pairs(named, field="en:de")) == expected


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("a\tb\tc", "x.tsv", "item 1 of .* expected a source text and a target"),
        ("a\t", "x.tsv", "both not empty"),
        ("", "x.tsv", "contains no pair"),
        ('{"source": "a"}', "x.jsonl", "line 1 of .* has no field 'target'; it has source"),
        ("{", "x.jsonl", "line 1 of .* is not valid JSON"),
        ("a b", "x.txt", "not a file of pairs"),
    ],
)
def test_what_is_no_pair_is_refused_in_words(tmp_path: Path, content, name, message):
    path = tmp_path / name
    path.write_text(content, "utf8")
    with pytest.raises(BadText, match=message):
        list(iter_pairs(path))


def test_a_missing_file_and_a_single_field_are_refused(tmp_path: Path):
    with pytest.raises(BadText, match="there is no file"):
        iter_pairs(tmp_path / "missing.tsv")
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"source": "a", "target": "b"}', "utf8")
    with pytest.raises(BadSettings, match="names one field"):
        list(iter_pairs(path, field="source"))


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_decoder_is_read_with_its_source_and_the_last_layer_is_the_models_answer(name):
    transformer = translator(name)
    pairs = [("the cat sat", "a dog ran under it"), ("it was night and then day", "a star")]
    readings = Lens(transformer).read(pairs)
    for pair, reading in zip(pairs, readings, strict=True):
        source, target = encode_pair(transformer, *pair)
        assert target[0] == transformer.model.config.decoder_start_token_id
        assert len(reading.tokens) == len(target)
        with torch.inference_mode():
            own = transformer.model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target])
            ).logits[0]
        ours = reading.tracks["logit"]
        assert ours.ids[-1, :, 0].tolist() == own.argmax(-1).tolist()
        alone = Lens(transformer).read(pair)
        assert torch.allclose(alone.tracks["logit"].probs, ours.probs, atol=1e-5)
    other = Lens(transformer).read(("another source", pairs[0][1]))
    assert not torch.allclose(other.tracks["logit"].probs, readings[0].tracks["logit"].probs)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_is_fitted_and_evaluated_on_pairs(name):
    transformer = translator(name)
    bank = ll.fit(transformer, PAIRS, Sampling(positions="all"))
    scores = ll.evaluate(transformer, bank, PAIRS)
    rows = {(r["map"], r["layer"], r["metric"]): r["value"] for r in scores.scores}
    assert rows["linear", 3, "precision@1"] == 1
    assert rows["linear", 2, "kl"] < rows["logit", 2, "kl"]


def test_the_right_answer_of_a_pair_is_the_next_token_of_its_target():
    transformer = translator("t5")
    for example in iter_examples(transformer, PAIRS, Sampling(positions="all"), side="both"):
        source, target = PAIRS[example.document]
        assert example.source == tuple(transformer.tokenizer(source)["input_ids"])
        assert example.ids[1:] == tuple(transformer.tokenizer(target)["input_ids"][:-1])
        assert example.gold == (*example.ids[1:], -1)


@pytest.mark.parametrize("given", ["hello", ["a", "b"], ("only one",), ("a", "b", "c")])
def test_what_is_no_pair_cannot_be_read_by_an_encoder_decoder(given):
    transformer = translator("t5")
    with pytest.raises(BadSettings, match="expected a tuple \\(source, target\\)"):
        transformer.capture(given)
    with pytest.raises(BadSettings, match="expected a tuple \\(source, target\\)"):
        Lens(transformer).read(given)


def test_a_model_of_pairs_has_no_default_text():
    with pytest.raises(BadText, match=r"reads pairs of texts; give a \.tsv"):
        ll.fit(translator("bart"))


def test_titles_are_the_beginnings_of_articles_with_their_names(tmp_path, monkeypatch):
    articles = [
        {"name": "Cat", "text": "A cat is an animal.\n\nIt sleeps."},
        {"name": "Tree", "text": "A tree grows."},
    ]
    path = tmp_path / "articles.jsonl"
    path.write_text("\n".join(map(json.dumps, articles)), "utf8")
    monkeypatch.setattr(documents, "fetch", lambda name: {"wikipedia": path}[name])
    found = [(document.text, document.target) for document in iter_pairs("titles")]
    assert found == [
        (f"{ASK}A cat is an animal.", "Cat"),
        (f"{ASK}A tree grows.", "Tree"),
    ]
