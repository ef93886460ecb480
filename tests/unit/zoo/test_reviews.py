"""Film reviews, and the small BERT that is trained on them."""

import json
import random
from pathlib import Path

import pytest

import layerleap as ll
from layerleap.lens.lens import Lens
from layerleap.stream import split
from layerleap.stream.documents import Document
from layerleap.zoo.reviews import is_held_out, iter_reviews
from layerleap.zoo.small_bert import BertSettings, bert_reviews
from layerleap.zoo.training_loop import shuffled_batches

WORDS = [
    "the",
    "film",
    "was",
    "a",
    "long",
    "story",
    "about",
    "two",
    "people",
    "in",
    "an",
    "old",
    "house",
    "by",
    "the",
    "sea",
]
TINY = BertSettings(
    layers=2,
    d_model=32,
    heads=2,
    vocabulary=200,
    max_tokens=24,
    epochs=4,
    batch=16,
    rate=3e-3,
)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up reviews whose verdict is one word."""
    rng, rows = random.Random(0), []
    for number in range(400):
        words = rng.choices(WORDS, k=rng.randint(5, 15))
        words.insert(rng.randrange(len(words)), ("dreadful", "wonderful")[number % 2])
        rows.append({"name": f"r{number}", "text": " ".join(words), "label": number % 2})
    path = tmp_path_factory.mktemp("reviews") / "reviews.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf8")
    return path


@pytest.fixture(scope="module")
def trained(reviews, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    card = bert_reviews({"reviews": reviews}, folder, TINY)
    return folder, card


def test_reviews_are_cleaned_and_kept_once(tmp_path: Path):
    table = tmp_path / "table.csv"
    table.write_text(
        'text,label,source\n"Good.<br /><br />Very ""good"".",1,imdb\nbad,0,rotten_tomatoes\n'
        "bad,0,imdb\n",
        "utf8",
    )
    assert list(iter_reviews(table)) == [
        ("imdb-00001", 'Good.\n\nVery "good".', 1),
        ("rotten_tomatoes-00002", "bad", 0),
    ]


@pytest.mark.parametrize("text", ["a", "good film", "\ud800 half a pair", "ü" * 50])
def test_reviews_are_held_out_as_documents_are(text):
    """A review that the model was trained on is never among the held-out documents of a fit."""
    document = Document("x", text)
    for share in (0.1, 0.25, 0.9):
        expected = split.is_held_out(document, share=share, seed=0)
        assert is_held_out(text, share) == expected


def test_every_text_is_in_one_batch_and_similar_lengths_go_together():
    encoded = [[0] * n for n in range(1, 300)]
    batches = list(shuffled_batches(encoded, 16, random.Random(0)))
    assert sorted(row for batch in batches for row in batch) == list(range(299))
    spread = [max(batch) - min(batch) for batch in batches]
    assert max(spread) < 32


def test_the_recipe_learns_and_the_model_is_read_fitted_and_evaluated(trained, reviews):
    folder, card = trained
    assert card["held_out"]["accuracy"] > 0.9
    assert card["held_out"]["texts"] + card["fitted"]["texts"] == 400
    model = ll.load(str(folder))
    assert (model.kind, model.n_layers, model.d_vocab) == ("text-class", 2, 2)
    readings = Lens(model).read(["a wonderful film", "the story was dreadful"])
    last = [list(reading.rows())[-1]["top"][0]["token"] for reading in readings]
    assert last == ["positive", "negative"]
    bank = ll.fit(model, str(reviews))
    scores = ll.evaluate(model, bank, str(reviews))
    rows = {(r["map"], r["layer"], r["metric"]): r["value"] for r in scores.scores}
    assert rows["linear", 1, "precision@1"] > 0.8
    assert rows["linear", 2, "precision@1"] == 1


def test_the_recipe_is_reproducible(trained, reviews, tmp_path):
    folder, card = trained
    again = bert_reviews({"reviews": reviews}, tmp_path, TINY)
    assert again == card
    ours, theirs = (ll.load(str(f)).identity.fingerprint for f in (folder, tmp_path))
    assert ours == theirs
