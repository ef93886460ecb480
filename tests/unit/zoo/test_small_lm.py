"""Small language models and their fine-tuned copies, trained here in seconds."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from families import build
from layerleap.models.load import load
from layerleap.models.weights import feed_forward, ffn_keys
from layerleap.zoo.catalog import CATALOG, result_words
from layerleap.zoo.fine_tuned import TunedSettings, classifier_of_reviews, tuned_on_reviews
from layerleap.zoo.reviews import is_held_out
from layerleap.zoo.small_lm import (
    LMSettings,
    known_tokens,
    lm_loss,
    sides_of,
    small_lm,
    token_losses,
    token_stream,
    train_lm,
)
from layerleap.zoo.train import RECIPES, train
from logged import logged
from tiny_models import WORDS, tokenizer

TINY = LMSettings(
    layers=2,
    d_model=16,
    heads=2,
    context=16,
    least_count=2,
    epochs=4,
    batch=8,
    rate=1e-2,
    tested_tokens=400,
)
TUNED = TunedSettings(
    blocks=1, ends=False, texts=200, tested=60, max_tokens=16, epochs=6, batch=16, rate=1e-2
)
FOLLOWS = dict(pairwise(WORDS[:20]))  # what mostly comes next


def story(rng: random.Random, n: int = 40) -> str:
    """Words that often follow each other in the order of `WORDS`."""
    words = [rng.choice(WORDS[:20])]
    while len(words) < n:
        words.append(
            FOLLOWS.get(words[-1], WORDS[0]) if rng.random() < 0.7 else rng.choice(WORDS[:20])
        )
    return " ".join(words)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model whose tokenizer is shared, stories, and reviews whose verdict is one word."""
    folder, rng = tmp_path_factory.mktemp("sources"), random.Random(0)
    build("llama", tie_word_embeddings=True).save_pretrained(folder / "smollm2")
    tokenizer().save_pretrained(folder / "smollm2")
    stories = [{"name": f"s{n}", "text": story(rng)} for n in range(60)]
    stories[0]["text"] += " came"  # once: too rare to be known
    reviews = []
    for number in range(400):
        words = rng.choices(WORDS[:17], k=rng.randint(4, 9))  # without red and blue
        words.insert(rng.randrange(len(words)), ("red", "blue")[number % 2])
        reviews.append({"name": f"r{number}", "text": " ".join(words), "label": number % 2})
    paths = {"smollm2": folder / "smollm2"}
    for name, rows in (("wikipedia", stories), ("reviews", reviews)):
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text("\n".join(map(json.dumps, rows)), "utf8")
    return paths


@pytest.fixture(scope="module")
def trained(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small-lm")
    with logged() as messages:
        card = small_lm(sources, folder, TINY)
    return folder, card, messages


def test_the_model_is_accepted_and_has_learned(sources, trained):
    folder, card, messages = trained
    model = load(str(folder))  # every law
    assert (model.kind, model.n_layers, model.d_model, model.d_vocab) == ("next-token", 2, 16, 61)
    assert model.tokenizer.get_vocab() == tokenizer().get_vocab()
    assert card["held_out"]["loss"] < 0.9 * torch.log(torch.tensor(20.0))
    assert card["settings"] == {**vars(TINY)}
    assert "tokens are known" in messages[0]


def test_the_relu_model_is_trained_by_the_same_recipe_and_its_coefficients_are_not_negative(
    sources, tmp_path
):
    settings = replace(TINY, ffn="relu")
    card = small_lm(sources, tmp_path, settings)
    model = load(str(tmp_path))
    keys = [ffn_keys(model, block) for block in (1, 2)]
    assert {(one.activation, *one.rows) for one in keys} == {("relu", "ffn.key")}
    assert feed_forward(model, 1).n_neurons == 64
    assert card["held_out"]["loss"] < 0.9 * torch.log(torch.tensor(20.0))
    assert card["settings"]["ffn"] == "relu"
    table = model.model.get_input_embeddings().weight
    assert torch.equal(table, model.model.get_output_embeddings().weight)
    assert int((table.abs().sum(1) > 0).sum()) == card["known_tokens"]


def test_unknown_tokens_have_no_embedding_and_known_ones_do(sources, trained):
    folder, card, _ = trained
    table = load(str(folder)).model.get_input_embeddings().weight
    fitted, _ = sides_of(sources["wikipedia"])
    known = known_tokens(token_stream(tokenizer(), fitted), TINY.least_count)
    assert len(known) == card["known_tokens"]
    is_known = torch.zeros(len(table), dtype=torch.bool)
    is_known[known] = True
    assert (table[~is_known] == 0).all()
    assert (table[is_known].abs().sum(1) > 0).all()
    assert not is_known[tokenizer().convert_tokens_to_ids("came")]


def test_the_short_softmax_is_that_over_the_whole_vocabulary(sources, trained):
    """The loss in training is the loss of the finished model."""
    folder, _, _ = trained
    whole = load(str(folder)).model
    table = whole.get_input_embeddings().weight
    known = (table.abs().sum(1) > 0).nonzero()[:, 0]
    number = torch.full((len(table),), len(known))
    number[known] = torch.arange(len(known))
    compact = build(
        "llama",
        vocab_size=len(known) + 1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=len(known),
    )
    weights = {k: v for k, v in whole.state_dict().items() if v.shape != table.shape}
    rows = torch.cat([table[known], torch.zeros(1, 16)])
    tied = {"model.embed_tokens.weight": rows, "lm_head.weight": rows}
    compact.load_state_dict({**weights, **tied})
    ids = torch.tensor([[6, 7, 8, 60, 9, 45, 5]])  # some are unknown
    assert (number[ids] == len(known)).any()
    with torch.no_grad():
        short = token_losses(compact, number[ids], len(table) - len(known))
        logits = whole(input_ids=ids).logits[0, :-1]
        full = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(short, full, rtol=1e-4, atol=1e-4)


def test_the_same_seed_gives_the_same_weights_and_another_does_not(sources):
    stream = token_stream(tokenizer(), sides_of(sources["wikipedia"])[0])[:300]
    known = known_tokens(stream, 2)
    state = torch.get_rng_state()

    def weights(seed: int) -> torch.Tensor:
        settings = replace(TINY, epochs=1, seed=seed)
        model = train_lm(stream, known, 61, tokenizer(), settings)
        return model.get_input_embeddings().weight

    first = weights(0)
    assert torch.equal(first, weights(0))
    assert not torch.allclose(first, weights(1), atol=1e-3)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers go on


def test_held_out_documents_are_not_trained_on(sources):
    fitted, held_out = sides_of(sources["wikipedia"])
    assert held_out
    assert len(fitted) + len(held_out) == 60
    assert all(is_held_out(text) for text in held_out)
    assert not any(is_held_out(text) for text in fitted)


def test_the_classifier_differs_from_the_model_in_its_last_blocks_and_head(
    sources, trained, tmp_path
):
    folder, _, _ = trained
    given = {"small-lm": folder, "reviews": sources["reviews"]}
    card = classifier_of_reviews(given, tmp_path, TUNED)
    model, base = load(str(tmp_path)), load(str(folder))
    assert model.kind == "text-class"
    assert [model.output_name(k) for k in (0, 1)] == ["negative", "positive"]
    assert card["held_out"]["texts"] == 60
    assert card["held_out"]["accuracy"] > 0.7  # the verdict is one word
    own = base.model.state_dict()
    changed = {
        name
        for name, value in model.model.state_dict().items()
        if name in own and not torch.equal(value, own[name])
    }
    assert changed
    assert all(name.startswith("model.layers.1.") for name in changed)


@pytest.mark.parametrize("name", ["small-lm", "small-lm-2", "small-lm-relu"])
def test_a_recipe_needs_no_more_than_the_catalog_gives_it(name, sources, tmp_path):
    given = {source: sources[source] for source in CATALOG[name].trained_from}
    card = RECIPES[name](given, tmp_path)
    assert card["held_out"]["tokens"] > 0


def test_the_embeddings_of_the_classifier_are_trained_if_asked_for(sources, trained, tmp_path):
    given = {"small-lm": trained[0], "reviews": sources["reviews"]}
    settings = replace(TUNED, blocks=2, ends=True, epochs=1)
    classifier_of_reviews(given, tmp_path, settings)
    new, old = (load(str(one)).model.state_dict() for one in (tmp_path, trained[0]))
    same = [name for name in new if name in old and torch.equal(new[name], old[name])]
    assert not same


def test_the_tuned_language_model_reads_reviews_better(sources, tmp_path):
    settings = replace(TUNED, epochs=2)
    card = tuned_on_reviews(sources, tmp_path, settings)
    assert card["held_out"]["loss"] < card["held_out"]["loss_before"]
    model = load(str(tmp_path))
    base = load(str(sources["smollm2"])).model.state_dict()
    changed = {k for k, v in model.model.state_dict().items() if not torch.equal(v, base[k])}
    assert changed
    assert all(name.startswith("model.layers.2.") for name in changed)


def test_a_language_model_is_cached_with_its_loss(sources, empty_cache, monkeypatch, messages):
    quick = lambda own, folder: small_lm(own, folder, replace(TINY, epochs=1))  # noqa: E731
    monkeypatch.setitem(RECIPES, "small-lm", quick)
    train(CATALOG["small-lm"], sources)
    entry = CATALOG["small-lm"]
    assert entry.is_cached
    card = json.loads((entry.path / "layerleap.json").read_text())
    assert messages[-1] == f"small-lm: {result_words(card['held_out'])}"
    assert entry.to_dict()["note"].endswith("held-out tokens")


def test_the_loss_of_a_stream_is_the_mean_over_its_tokens():
    model = build("llama").eval()
    stream = torch.randint(5, 61, (25,), generator=torch.Generator().manual_seed(0))
    found = lm_loss(model, stream, 10)
    sums, count = 0.0, 0
    for part in (stream[:10], stream[10:20], stream[20:]):
        with torch.no_grad():
            log_p = model(input_ids=part[None]).logits[0].log_softmax(-1)
        sums -= float(log_p[torch.arange(len(part) - 1), part[1:]].sum())
        count += len(part) - 1
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(sums / count, rel=1e-5)
