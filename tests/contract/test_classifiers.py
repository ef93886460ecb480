"""Text, token and image classifiers: read, fitted, evaluated and exited early."""

import json
from pathlib import Path

import pytest
import torch

import layerleap as ll
from families import CLASS, POOLED_IMAGE, TEXT_CLASS, TOKEN_CLASS, build
from layerleap.act.exits.evidence import Evidence
from layerleap.act.exits.replay import replay
from layerleap.act.exits.rules import Gap
from layerleap.errors import BadSettings
from layerleap.lens.lens import Lens
from layerleap.lens.scores import score
from layerleap.models.discovery.compare import row_gap as gap
from layerleap.models.discovery.probe import probe
from layerleap.models.transformer import Transformer
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Sampling
from media import seeing, sets
from tiny_models import sentences, tokenizer

LABELS = {"id2label": {0: "bad", 1: "poor", 2: "fair", 3: "good"}}
TEXTS = {**TEXT_CLASS, **TOKEN_CLASS}
IMAGES = {**CLASS, **POOLED_IMAGE}


def classifier(name: str) -> Transformer:
    """A tiny text or token classifier; encoders get [CLS] and [SEP]."""
    kind = "next-token" if name.startswith(("gpt2", "llama")) else "masked-token"
    changes = LABELS if not name.startswith("roberta") else {**LABELS, "pad_token_id": 0}
    return Transformer.wrap(build(name, **changes), tokenizer(kind), name=f"tiny-{name}")


def test_the_gradient_by_a_pooled_row_is_that_of_moving_the_mean_state():
    transformer = Transformer.wrap(build("beit").double(), check=False)
    inputs, last = probe(transformer.model, rows=2, seed=4), transformer.n_layers

    def metric(logits):
        return logits[:, 1] - logits[:, 0]

    whole = transformer.capture(inputs, layers=[last], gradients=metric)
    keep = transformer.pooled(torch.ones(whole.states[last].shape[:2]))
    read = transformer.capture(inputs, layers=[last], keep=keep, gradients=metric)
    own = read.gradients.states[last]
    torch.testing.assert_close(own, (whole.gradients.states[last] * keep[..., None]).sum(1))
    along = torch.linspace(-1, 1, transformer.d_model, dtype=torch.float64)
    up, down = (
        metric(transformer.logits(read.states[last] + step * along)) for step in (1e-3, -1e-3)
    )
    torch.testing.assert_close(own @ along, (up - down).double() / 2e-3, rtol=2e-2, atol=2e-3)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in sentences(80)), "utf8")
    return str(path)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sets(tmp_path_factory.mktemp("images"), n=60))


@pytest.mark.parametrize("name", TEXTS)
def test_the_last_layer_reads_what_the_classifier_says_alone_and_in_a_batch(name):
    transformer = classifier(name)
    texts = ["the cat sat", "a big dog ran under the old tree", "it was night"]
    readings = Lens(transformer).read(texts)
    for text, reading in zip(texts, readings, strict=True):
        inputs = transformer.tokenizer(text, return_tensors="pt")
        ids = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            own = transformer.model(**ids).logits.softmax(-1)
        own = own if own.dim() == 2 else own[0]
        last = [row for row in reading.rows() if row["layer"] == transformer.n_layers]
        assert len(last) == len(own)
        for row, probabilities in zip(last, own, strict=True):
            best = int(probabilities.argmax())
            assert row["top"][0]["token"] == LABELS["id2label"][best]
            assert row["top"][0]["prob"] == pytest.approx(probabilities[best].item(), abs=1e-5)
            assert row["agrees"]


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_classifier_is_fitted_evaluated_and_exited_early(name, documents):
    transformer = classifier(name)
    bank = ll.fit(transformer, documents)
    scores = ll.evaluate(transformer, bank, documents)
    assert scores.n_documents > 5
    rows = {(r["map"], r["layer"], r["metric"]): r["value"] for r in scores.scores}
    last = transformer.n_layers
    assert rows["linear", last, "precision@1"] == 1
    assert rows["linear", last - 1, "kl"] < rows["logit", last - 1, "kl"]
    assert_exits(transformer, bank, documents)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_classifier_is_fitted_evaluated_and_exited_early(name, pictures):
    transformer = seeing(name)
    bank = ll.fit(transformer, pictures)
    scores = ll.evaluate(transformer, bank, pictures)
    rows = {(r["map"], r["layer"], r["metric"]): r["value"] for r in scores.scores}
    last = transformer.n_layers
    assert rows["logit", last, "precision@1"] == rows["linear", last, "precision@1"] == 1
    assert rows["linear", last - 1, "r2"] > rows["logit", last - 1, "r2"]
    assert_exits(transformer, bank, pictures)


def assert_exits(transformer, bank, source):
    """A strict rule gives the full model's answers, and a loose one leaves earlier."""
    batches = batches_of(transformer, source, Sampling(), side="held-out")
    scores = score(transformer, {"linear": bank.lens(transformer)}, batches)
    evidence = Evidence.from_scores(scores, "linear")
    never, always = (replay(Gap(lam, length=4.0), evidence) for lam in (1.112, -1.112))
    assert (never.layer == transformer.n_layers).all()
    assert never.agrees.all()
    assert (always.layer == 1).all()


@pytest.mark.parametrize("name", ["bert_text", "llama_text", "distilbert_token"])
def test_suitability_of_a_text_classifier_runs_whole_texts(name, documents):
    result = ll.studies.suitability(
        classifier(name), text=documents, n_fit=150, n_read=120, tolerance=0.3, context=8, repeats=3
    )
    assert result.tables["verdict"][0]["answer"] in ("worth it", "not worth it", "cannot tell")
    assert result.tables["timing"][0]["mode"] == "whole"


@pytest.mark.parametrize("name", ["vit", "beit", "dinov2_patches"])
def test_suitability_of_an_image_classifier_pays_for_every_state_that_is_mapped(name, tmp_path):
    transformer = seeing(name)
    result = ll.studies.suitability(
        transformer,
        text=str(sets(tmp_path, n=260)),
        n_fit=150,
        n_read=100,
        tolerance=0.3,
        repeats=3,
    )
    assert result.tables["verdict"][0]["answer"] in ("worth it", "not worth it", "cannot tell")
    cost = result.row("costs", map="linear")
    assert result.tables["timing"][0]["context"] == cost["context"] == 17
    states = 17 if transformer.row_kind == "sequence" else 1
    assert cost["maps"][0] == states * 2 * transformer.d_model**2


def test_averaging_states_and_mapping_them_commute():
    """Maps are affine, so the map of the mean that BEiT pools is the mean of the maps."""
    transformer = seeing("beit")
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    h = transformer.capture(pixels, layers=[1]).states[1].double()
    weight = torch.randn(h.shape[-1], h.shape[-1], generator=torch.Generator().manual_seed(3))
    mapped = h @ weight.double() + 0.3
    keep = transformer.pooled(torch.ones(h.shape[:2]))
    assert not keep[:, 0].any()
    assert keep[:, 1:].all()
    before, after = (
        transformer.rows(h, keep) @ weight.double() + 0.3,
        transformer.rows(mapped, keep),
    )
    assert gap(before, after) < 1e-12


def test_a_head_that_pools_normed_positions_reads_whole_sequences():
    transformer = seeing("dinov2_patches")
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    captured = transformer.capture(pixels, logits=True)
    h = captured.states[transformer.n_layers]
    assert gap(transformer.logits(h), captured.logits) < 1e-4
    with pytest.raises(BadSettings, match="expected a tensor of \\(row, pos, 24\\)"):
        transformer.logits(h[:, 0])
    with pytest.raises(BadSettings, match="expected a tensor of \\(row, 24\\)"):
        seeing("vit").logits(h)


def test_a_last_position_head_skips_padding_tokens_that_end_a_text():
    """Such heads look for the padding token, which often ends texts as well."""
    transformer = classifier("gpt2_text")
    ids = [9, 8, 7, 0, 0]  # 0 is the padding token
    own = transformer.model(torch.tensor([ids])).logits.softmax(-1)[0]
    row = list(Lens(transformer).read(ids).rows())[-1]
    assert row["top"][0]["prob"] == pytest.approx(own.max().item(), abs=1e-5)


def test_positions_of_a_text_classifier_are_those_of_its_head():
    transformer = classifier("bert_text")
    assert Lens(transformer).read("the cat sat").positions == [0]
    assert Lens(classifier("gpt2_text")).read("the cat sat").positions == [2]
    with pytest.raises(BadSettings, match="classifies whole texts"):
        Lens(transformer).read("the cat sat", positions=[1])


@pytest.mark.parametrize("name", ["bert_text", "roberta_token"])
def test_a_saved_classifier_loads_with_its_head_and_kind(name, tmp_path: Path):
    transformer = classifier(name)
    transformer.model.save_pretrained(tmp_path)
    transformer.tokenizer.save_pretrained(tmp_path)
    loaded = ll.load(str(tmp_path))
    assert (loaded.kind, loaded.tail) == (transformer.kind, transformer.tail)
    assert loaded.output_name(3) == "good"
