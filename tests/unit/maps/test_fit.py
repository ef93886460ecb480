"""`fit` and `default_bank`: from a model and a text to a bank."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import sentences, tiny

from layerleap.errors import BadSettings, CannotWrite
from layerleap.maps import fit as maps_fit
from layerleap.maps.fit import default_bank, fit, solve_bank
from layerleap.stats.collect import collect
from layerleap.stream.examples import Sampling

COLLECT = sys.modules[collect.__module__]  # `layerleap.stats.collect` itself is the function


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture
def default_source(monkeypatch, tmp_path):
    """Stand-in for the bundled text."""
    path = tmp_path / "default.txt"
    path.write_text("\n".join(sentences(40)))
    for module in (maps_fit, COLLECT):
        monkeypatch.setattr(module, "default_text", lambda _: str(path))
    return path


@pytest.mark.parametrize("ridge", [0.0, 0.1, "auto"])
def test_fitting_a_bank_is_collecting_and_solving(llama, ridge):
    texts = sentences(60)
    tally = collect(llama, texts, choose_ridge=ridge == "auto")
    expected = solve_bank(tally, ridge=ridge, intercept=True, rank=5)
    actual = fit(llama, texts, ridge=ridge, intercept=True, rank=5)
    for pair, shortcut in expected.maps.items():
        for name, tensor in shortcut.tensors().items():
            assert torch.equal(actual.maps[pair].tensors()[name], tensor)
    assert actual.fits == expected.fits
    assert actual.settings["ridge"] == ridge
    assert (actual.settings["rank"], actual.settings["unit"]) == (5, "sentence")
    assert actual.data["rows_fitted"] == tally.fit.n
    assert actual.data["text"] == "given texts"


def test_an_automatic_ridge_needs_rows_held_back(llama):
    with pytest.raises(
        BadSettings, match=r"these statistics have none: .*--ridge auto.* a ridge as a number"
    ):
        solve_bank(collect(llama, sentences(30)), ridge="auto")
    few = collect(llama, sentences(30), n_texts=1, choose_ridge=True)
    assert few.held_back.n == 0
    with pytest.raises(BadSettings, match="give more documents, or a ridge as a number"):
        solve_bank(few, ridge="auto")


def test_solving_options_are_kept_with_the_statistics(llama):
    solving = {"intercept": True, "ridge": 0.5, "rank": 4}
    tally = collect(llama, sentences(30), solving=solving)
    bank = solve_bank(tally)
    assert {key: bank.settings[key] for key in solving} == solving
    assert bank[0, 3].rank == 4
    assert {fit.ridge for fit in bank.fits.values()} == {0.5}
    assert solve_bank(tally, ridge=0.0, rank=7).settings["ridge"] == 0.0
    assert solve_bank(tally, intercept=False)[0, 3].bias is None


def test_without_a_text_the_models_default_is_taken(llama, default_source):
    tally = collect(llama)
    assert tally.about["text"] == str(default_source)
    assert fit(llama).data["rows_fitted"] == tally.fit.n > 0


def test_solving_reports_every_layer(llama):
    reported = []
    solve_bank(collect(llama, sentences(20)), progress=lambda *step: reported.append(step))
    assert reported == [("solving", done, 3, "layers") for done in (1, 2, 3)]


def test_a_default_bank_is_fitted_once_and_kept(llama, empty_cache, default_source, monkeypatch):
    reported = []
    first = default_bank(llama, tell=reported.append)
    assert len(reported) == 1
    assert "no bank for tiny-llama yet" in reported[0]
    folders = [path for path in (empty_cache / "banks").iterdir()]
    (folder,) = folders
    assert re.fullmatch(f"{llama.identity.fingerprint}-[0-9a-f]{{8}}", folder.name)
    monkeypatch.setattr(maps_fit, "fit", lambda *_, **__: pytest.fail("fitted again"))
    second = default_bank(llama, tell=reported.append)
    assert len(reported) == 1
    for pair, shortcut in first.maps.items():
        assert torch.equal(second.maps[pair].weight, shortcut.weight)


def test_another_model_gets_a_default_bank_of_its_own(llama, empty_cache, default_source):
    default_bank(llama)
    other = tiny("llama", seed=1)
    default_bank(other).check_model(other)
    assert len(list((empty_cache / "banks").iterdir())) == 2


def test_a_damaged_default_bank_is_fitted_again(llama, empty_cache, default_source):
    expected = default_bank(llama)
    (folder,) = (empty_cache / "banks").iterdir()
    (folder / "maps.safetensors").write_bytes(b"cut")
    reported = []
    actual = default_bank(llama, tell=reported.append)
    assert "changed or truncated" in reported[0]
    assert torch.equal(actual[0, 3].weight, expected[0, 3].weight)
    assert default_bank(llama, tell=reported.append).check_model(llama) is None
    assert len(reported) == 2


def test_what_is_left_of_a_default_bank_is_fitted_again(llama, empty_cache, default_source):
    expected = default_bank(llama)
    (folder,) = (empty_cache / "banks").iterdir()
    (folder / "bank.json").unlink()
    assert torch.equal(default_bank(llama)[0, 3].weight, expected[0, 3].weight)
    assert (folder / "bank.json").exists()


def test_other_defaults_give_another_default_bank(llama, empty_cache, default_source, monkeypatch):
    default_bank(llama)
    plan = {"sampling": Sampling(unit="paragraph", held_out=0.0), "n_texts": 20}
    monkeypatch.setattr(maps_fit, "_default_plan", lambda _: plan)
    assert default_bank(llama).settings["positions"] == "one"
    assert len(list((empty_cache / "banks").iterdir())) == 2


def checkpoint_of(cache) -> Path:
    """Where the fit of the one bank in the cache keeps its checkpoint."""
    (folder,) = (cache / "banks").iterdir()
    return folder.with_suffix(".fitting.safetensors")


@pytest.mark.parametrize("kind", ["junk", "foreign"])
def test_a_bad_checkpoint_in_the_cache_is_not_in_the_way(llama, empty_cache, default_source, kind):
    expected = default_bank(llama)
    checkpoint = checkpoint_of(empty_cache)
    shutil.rmtree(empty_cache / "banks")
    (empty_cache / "banks").mkdir()
    if kind == "junk":
        checkpoint.write_bytes(b"junk")
    else:
        collect(llama, sentences(9)).save(checkpoint)
    reported = []
    actual = default_bank(llama, tell=reported.append)
    assert torch.equal(actual[0, 3].weight, expected[0, 3].weight)
    assert any(checkpoint.name in line for line in reported)
    assert not checkpoint.exists()


def test_a_default_bank_is_given_even_if_it_cannot_be_kept(
    llama, default_source, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "file"))
    reported, passes = [], []
    bank = default_bank(llama, tell=reported.append, progress=lambda *step: passes.append(step))
    bank.check_model(llama)
    assert "the bank was not cached: cannot write" in reported[-1]
    assert sum(step[0] == "solving" for step in passes) == 3  # one fit, not two
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_default_bank_is_given_even_if_saving_fails(
    llama, empty_cache, default_source, monkeypatch
):
    def full(*_):
        raise CannotWrite("cannot write: the disk is full")

    monkeypatch.setattr(maps_fit.ShortcutBank, "save_pretrained", full)
    reported = []
    default_bank(llama, tell=reported.append).check_model(llama)
    assert "the disk is full" in reported[-1]
    assert [path.suffix for path in (empty_cache / "banks").iterdir()] == [".safetensors"]


def test_a_masked_models_default_bank_hides_one_position_per_text(
    empty_cache, default_source, monkeypatch
):
    bert, batches = tiny("bert"), []
    batches_of = COLLECT.batches_of

    def watched(*args, **options):
        for batch in batches_of(*args, **options):
            batches.append(batch)
            yield batch

    monkeypatch.setattr(COLLECT, "batches_of", watched)
    bank = default_bank(bert)
    assert bank.settings["positions"] == "one"
    hidden = [(b.inputs["input_ids"] == bert.tokenizer.mask_token_id).sum(1) for b in batches]
    assert set(torch.cat(hidden).tolist()) == {1}
    plans = [maps_fit._default_plan(model) for model in (bert, tiny("llama"))]
    assert plans[0]["n_texts"] >= 4 * plans[1]["n_texts"]
