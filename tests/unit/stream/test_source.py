"""Which text is streamed for a model."""

import pytest
from tiny_models import tiny

from layerleap.errors import BadSettings
from layerleap.stream import source
from layerleap.stream.examples import Sampling
from layerleap.stream.source import default_text, resolve_text


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def test_a_given_text_is_streamed_as_it_is(llama):
    sampling = Sampling(seed=3)
    assert resolve_text(llama, "./x.txt", sampling) == ("./x.txt", sampling)
    assert resolve_text(llama, None, sampling) == ("wikipedia", sampling)


def test_models_that_speak_no_english_get_texts_of_their_own(llama, monkeypatch, tmp_path):
    monkeypatch.setattr(
        source, "drawn", lambda transformer, drawing, starts, progress: tmp_path / "drawn.jsonl"
    )
    path, sampling = resolve_text(llama, "drawn", Sampling(seed=3))
    assert path == tmp_path / "drawn.jsonl"
    assert (sampling.unit, sampling.per_document, sampling.seed) == ("paragraph", None, 3)
    monkeypatch.setattr(source, "DRAWN_BY_DEFAULT", ("tiny-llama",))
    assert default_text(llama) == "drawn"


def test_sequences_to_start_from_mean_drawn_texts_and_no_other(llama, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        source, "drawn", lambda _, drawing, starts, progress: asked.append(starts) or tmp_path
    )
    resolve_text(llama, None, Sampling(field="body"), starts="mine.txt")
    path, sampling = resolve_text(llama, "drawn", Sampling(field="body"), starts="mine.txt")
    assert asked == ["mine.txt", "mine.txt"]
    assert (path, sampling.field) == (tmp_path, "text")
    with pytest.raises(BadSettings, match="for drawn texts; the text is wikipedia"):
        resolve_text(llama, "wikipedia", Sampling(), starts="mine.txt")
