"""`collect`: which settings it takes and which text it reads; not the pass itself."""

import json

import pytest

from layerleap.errors import BadSettings
from layerleap.stats.collect import collect
from layerleap.stream import source
from layerleap.stream.examples import Sampling
from tiny_models import sentences, tiny


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.mark.parametrize("option", ["n_texts", "tokens_per_batch"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused(llama, option, value):
    with pytest.raises(BadSettings, match=f"{option} is {value}"):
        collect(llama, sentences(30), **{option: value})


def test_generated_texts_can_be_asked_for_in_python(llama, monkeypatch, tmp_path):
    path = tmp_path / "generated.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in sentences(40)))
    monkeypatch.setattr(source, "generated_texts", lambda *_, starts, progress: path)
    stats = collect(llama, "generated")
    assert stats.fit.n > 0
    assert stats.about["text"] == "generated"  # the cache's own name for it means nothing elsewhere
    assert stats.about["sampling"]["unit"] == "paragraph"
    assert stats.about["sampling"]["per_document"] is None


def test_only_as_many_texts_are_generated_as_are_needed(llama, monkeypatch, tmp_path):
    path, asked = tmp_path / "generated.jsonl", []
    path.write_text("\n".join(json.dumps({"text": text}) for text in sentences(40)))
    monkeypatch.setattr(
        source, "generated_texts", lambda _, settings, **__: asked.append(settings) or path
    )
    collect(llama, "generated", Sampling(held_out=0.25), n_texts=20)
    collect(llama, "generated", Sampling(held_out=0.25), n_texts=1501)
    collect(llama, "generated")
    assert [settings.n_texts for settings in asked] == [1000, 3000, 12_000]
