"""Which text a model gets, and what is streamed for it."""

import pytest

from layerleap.errors import BadSettings
from layerleap.stream import source as source_module
from layerleap.stream.examples import Sampling
from layerleap.stream.source import default_text, resolve_text
from tiny_models import tiny


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def test_a_text_given_by_name_or_path_is_streamed_unchanged(llama):
    sampling = Sampling(seed=3)
    assert resolve_text(llama, "./x.txt", sampling) == ("./x.txt", sampling)
    assert resolve_text(llama, None, sampling) == ("wikipedia", sampling)


def test_many_texts_come_from_thousands_of_articles_and_few_from_the_small_text(llama):
    assert default_text(llama, 1500 + 300) == "wikipedia"
    assert default_text(llama, 3000 + 800) == default_text(llama, 9000 + 3000) == "enwik8"


def test_models_not_trained_on_english_get_generated_texts(llama, monkeypatch, tmp_path):
    path = tmp_path / "generated.jsonl"
    monkeypatch.setattr(source_module, "generated_texts", lambda *_, starts, progress: path)
    source, sampling = resolve_text(llama, "generated", Sampling(seed=3))
    assert source == path
    assert (sampling.unit, sampling.per_document, sampling.seed) == ("paragraph", None, 3)
    monkeypatch.setattr(source_module, "NOT_ENGLISH", ("tiny-llama",))
    assert default_text(llama) == default_text(llama, 12_000) == "generated"


def test_starts_imply_generated_texts_and_are_refused_with_any_other(llama, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        source_module,
        "generated_texts",
        lambda *_, starts, progress: asked.append(starts) or tmp_path,
    )
    resolve_text(llama, None, Sampling(field="body"), starts="mine.txt")
    source, sampling = resolve_text(llama, "generated", Sampling(field="body"), starts="mine.txt")
    assert asked == ["mine.txt", "mine.txt"]
    assert (source, sampling.field) == (tmp_path, "text")
    with pytest.raises(
        BadSettings, match="only used for generated texts, but the text is wikipedia"
    ):
        resolve_text(llama, "wikipedia", Sampling(), starts="mine.txt")
