"""The short functions between model and bank that no other test file looks at."""

import pytest
import torch
from tiny_models import sentences, tiny

from layerleap import recipes
from layerleap.errors import BadSettings
from layerleap.recipes import bank_from, collect, default_bank, default_text, fit_bank, resolve_text
from layerleap.stream.examples import Sampling


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture
def default_source(monkeypatch, tmp_path):
    """Stand-in for the bundled text."""
    path = tmp_path / "default.txt"
    path.write_text("\n".join(sentences(40)))
    monkeypatch.setattr(recipes, "default_text", lambda _: str(path))
    return path


@pytest.mark.parametrize("ridge", [0.0, 0.1, "auto"])
def test_fitting_a_bank_is_collecting_and_solving(llama, ridge):
    texts = sentences(60)
    tally = collect(llama, texts, choose_ridge=ridge == "auto")
    wanted = bank_from(tally, ridge=ridge, intercept=True, rank=5)
    found = fit_bank(llama, texts, ridge=ridge, intercept=True, rank=5)
    for pair, shortcut in wanted.maps.items():
        for name, tensor in shortcut.tensors().items():
            assert torch.equal(found.maps[pair].tensors()[name], tensor)
    assert found.fits == wanted.fits
    assert found.settings["ridge"] == ridge
    assert (found.settings["rank"], found.settings["unit"]) == (5, "sentence")
    assert found.data["rows_fitted"] == tally.fit.n
    assert found.data["text"] == "given texts"


def test_an_automatic_ridge_needs_rows_held_back(llama):
    with pytest.raises(BadSettings, match="give more documents, or a ridge as a number"):
        bank_from(collect(llama, sentences(30)), ridge="auto")


def test_solving_reports_every_layer(llama):
    told = []
    bank_from(collect(llama, sentences(20)), progress=lambda *step: told.append(step))
    assert told == [("solving", done, 3, "layers") for done in (1, 2, 3)]


def test_a_given_text_is_streamed_as_it_is(llama):
    sampling = Sampling(seed=3)
    assert resolve_text(llama, "./x.txt", sampling) == ("./x.txt", sampling)
    assert resolve_text(llama, None, sampling) == ("wikipedia", sampling)


def test_models_that_speak_no_english_get_texts_of_their_own(llama, monkeypatch, tmp_path):
    monkeypatch.setattr(recipes, "drawn", lambda transformer, progress: tmp_path / "drawn.jsonl")
    source, sampling = resolve_text(llama, "drawn", Sampling(seed=3))
    assert source == tmp_path / "drawn.jsonl"
    assert (sampling.unit, sampling.per_document, sampling.seed) == ("paragraph", None, 3)
    monkeypatch.setattr(recipes, "DRAWN_BY_DEFAULT", ("tiny-llama",))
    assert default_text(llama) == "drawn"


def test_a_default_bank_is_fitted_once_and_kept(llama, empty_cache, default_source, monkeypatch):
    told = []
    first = default_bank(llama, tell=told.append)
    assert len(told) == 1
    assert "no bank of tiny-llama yet" in told[0]
    folders = [path for path in (empty_cache / "banks").iterdir()]
    assert [path.name for path in folders] == [llama.identity.fingerprint]
    monkeypatch.setattr(recipes, "fit_bank", lambda *_, **__: pytest.fail("fitted again"))
    second = default_bank(llama, tell=told.append)
    assert len(told) == 1
    for pair, shortcut in first.maps.items():
        assert torch.equal(second.maps[pair].weight, shortcut.weight)


def test_another_model_gets_a_default_bank_of_its_own(llama, empty_cache, default_source):
    default_bank(llama)
    other = tiny("llama", seed=1)
    default_bank(other).check_model(other)
    assert len(list((empty_cache / "banks").iterdir())) == 2


def test_a_damaged_default_bank_is_fitted_again(llama, empty_cache, default_source):
    wanted = default_bank(llama)
    (empty_cache / "banks" / llama.identity.fingerprint / "maps.safetensors").write_bytes(b"cut")
    told = []
    found = default_bank(llama, tell=told.append)
    assert "changed or cut short" in told[0]
    assert torch.equal(found[0, 3].weight, wanted[0, 3].weight)
    assert default_bank(llama, tell=told.append).check_model(llama) is None
    assert len(told) == 2
