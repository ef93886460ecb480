import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, Dinov2Config, Dinov2Model

from families import build
from layerleap.errors import CannotWrite
from layerleap.models.load import load
from layerleap.stream.images import image_batches
from layerleap.zoo import download, fetch, inventory
from layerleap.zoo.catalog import CATALOG
from layerleap.zoo.linear_head import at_size, fit_head, with_head
from layerleap.zoo.small_vit import VitSettings, train_vit
from layerleap.zoo.train import RECIPES, dinov2_mnist, train, vit_mnist
from layerleap.zoo.training_loop import accuracy
from media import sets

QUICK = VitSettings(layers=2, d_model=16, heads=2, epochs=2, batch=16)


@pytest.fixture
def digits(tmp_path):
    """Forty noisy images of each of three classes, which differ in where the image is bright."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 40)
    images = rng.integers(0, 60, (120, 28, 28), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[8 * label : 8 * label + 8] += 150
    path = tmp_path / "digits.npz"
    np.savez(path, images=images, labels=labels)
    return path


@pytest.fixture
def backbone(tmp_path):
    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=42,
        patch_size=14,
        use_mask_token=False,
    )
    model = Dinov2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "backbone")
    return tmp_path / "backbone"


def test_a_backbone_at_another_size_gives_what_the_model_interpolates_itself(backbone):
    model = Dinov2Model.from_pretrained(backbone)
    smaller = at_size(model, 28)
    assert smaller.config.image_size == 28
    pixels = torch.randn(2, 3, 28, 28)
    with torch.inference_mode():
        ours, theirs = (m(pixels).last_hidden_state for m in (smaller, model))
    torch.testing.assert_close(ours, theirs)


def test_the_head_uses_only_the_cls_state(backbone):
    model = Dinov2Model.from_pretrained(backbone)
    weight, bias = torch.randn(5, 24).double(), torch.randn(5).double()
    whole = with_head(model, weight, bias)
    pixels = torch.randn(2, 3, 42, 42)
    with torch.inference_mode():
        expected = model(pixels).last_hidden_state[:, 0].double() @ weight.T + bias
        torch.testing.assert_close(whole(pixels).logits.double(), expected, rtol=1e-4, atol=1e-4)
    assert whole.config.num_labels == 5
    assert whole.config.label2id["4"] == 4


def test_a_head_is_trained_cached_and_accepted_by_every_law(
    backbone, digits, empty_cache, capfd, messages
):
    capfd.readouterr()
    train(CATALOG["dinov2-mnist"], {"dinov2": backbone, "mnist": digits})
    assert capfd.readouterr() == ("", "")
    folder = CATALOG["dinov2-mnist"].path
    assert CATALOG["dinov2-mnist"].is_cached
    assert fetch("dinov2-mnist") == folder
    card = json.loads((folder / "layerleap.json").read_text())
    test = card["held_out"]
    assert test["images"] + card["fitted"]["images"] == 120
    assert 0 <= test["low"] <= test["accuracy"] <= test["high"] <= 1
    assert f"{test['accuracy']:.1%} accuracy on {test['images']} held-out images" in messages[-1]
    transformer = load("dinov2-mnist")  # the laws, among them that the tail gives the logits
    assert transformer.kind == "image-class"
    assert (transformer.n_layers, transformer.d_vocab) == (3, 3)
    batches = [
        (transformer.model(**batch.inputs).logits.argmax(-1), batch.gold)
        for batch in image_batches(transformer, digits, side="held-out")
    ]
    guessed, gold = (torch.cat(part) for part in zip(*batches, strict=True))
    assert len(gold) == test["images"]
    assert (guessed == gold).double().mean() == pytest.approx(test["accuracy"])
    entry = next(entry for entry in inventory() if entry.name == "dinov2-mnist")
    assert entry.is_cached
    assert entry.source == "trained here from dinov2 and mnist"
    accuracy_note = f"{test['accuracy']:.1%} accuracy on {test['images']} held-out images"
    assert entry.to_dict()["note"].endswith(accuracy_note)


def test_the_same_recipe_gives_the_same_head(backbone, digits, tmp_path):
    heads = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        sources = {"dinov2": backbone, "mnist": digits}
        dinov2_mnist(sources, tmp_path / name)
        heads.append((tmp_path / name / "model.safetensors").read_bytes())
    assert heads[0] == heads[1]


def test_a_small_vit_is_trained_and_its_accuracy_reported(digits, tmp_path, messages):
    results = vit_mnist({"mnist": digits}, tmp_path, QUICK)
    assert results["settings"]["epochs"] == 2
    assert results["held_out"]["images"] + results["fitted"]["images"] == 120
    transformer = load(str(tmp_path))
    assert (transformer.n_layers, transformer.d_vocab, transformer.d_model) == (2, 3, 16)
    assert AutoImageProcessor.from_pretrained(tmp_path).size["height"] == 28
    assert not transformer.model.training
    assert "training on" in messages[0]


def test_training_depends_only_on_its_seed_and_learns_something():
    torch.manual_seed(5)
    pixels, labels = torch.randn(90, 3, 8, 8), torch.arange(90) % 3
    pixels[torch.arange(90), labels] += 1.5
    settings = VitSettings(layers=2, d_model=16, heads=2, epochs=12, batch=16, shift=1, seed=3)

    def weights(**changes):
        torch.rand(1)  # earlier random numbers must not matter
        chosen = replace(settings, **changes)
        return train_vit(pixels, labels, 3, chosen)

    before = torch.get_rng_state()
    first = weights()
    assert not torch.equal(before, torch.get_rng_state())  # because of the call above only
    for ours, again in zip(first.parameters(), weights().parameters(), strict=True):
        assert torch.equal(ours, again)
    other = next(weights(seed=4, epochs=1).parameters())
    assert not torch.equal(next(first.parameters()), other)
    with torch.inference_mode():
        right = (first(pixels).logits.argmax(-1) == labels).double().mean()
    assert right > 0.6


def test_images_move_by_whole_pixels_and_show_the_background():
    from layerleap.zoo.small_vit import _shifted

    torch.manual_seed(0)
    pixels = torch.rand(50, 3, 6, 6) + 1
    moved = _shifted(pixels, 2)
    assert moved.shape == pixels.shape
    inner = pixels[:, :, 2:4, 2:4]  # never pushed out
    where = set()
    for image, core in zip(moved, inner, strict=True):
        (place,) = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(image[:, y : y + 2, x : x + 2], core)
        ]
        where.add(place)
    assert len(where) > 10
    assert (moved == pixels.min()).any()
    assert torch.equal(_shifted(pixels, 0), pixels)


def test_accuracy_has_wilsons_interval():
    logits = torch.eye(4)[torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])]
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 0])
    result = accuracy(logits, labels)
    assert (result["images"], result["accuracy"]) == (10, 0.9)
    assert result["low"] == pytest.approx(0.5958, abs=1e-4)
    assert result["high"] == pytest.approx(0.9821, abs=1e-4)


def test_an_interrupted_recipe_leaves_nothing(digits, empty_cache, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(RECIPES, "vit-mnist", stop)
    with pytest.raises(KeyboardInterrupt):
        train(CATALOG["vit-mnist"], {"mnist": digits})
    assert list((empty_cache / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_reported_before_minutes_are_spent(
    digits, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "file"))
    ran = []
    monkeypatch.setitem(RECIPES, "vit-mnist", lambda *_: ran.append(1))
    with pytest.raises(CannotWrite):
        train(CATALOG["vit-mnist"], {"mnist": digits})
    assert not ran


def test_first_use_fetches_the_sources_of_a_model_and_trains_it(
    digits, empty_cache, monkeypatch, messages
):
    asked = []
    monkeypatch.setattr(download, "fetch", lambda name: asked.append(name) or digits)
    quick = lambda sources, folder: vit_mnist(sources, folder, QUICK)  # noqa: E731
    monkeypatch.setitem(RECIPES, "vit-mnist", quick)
    transformer = load("vit-mnist")
    assert asked == ["mnist"]
    assert messages[0] == "training vit-mnist on this machine (once, about 5 minutes)"
    assert transformer.processor is not None
    assert transformer.identity.name == "vit-mnist"
    load("vit-mnist")
    assert asked == ["mnist"]


def test_every_trained_model_has_a_recipe_and_its_sources_are_in_the_catalog():
    trained = {name: entry for name, entry in CATALOG.items() if entry.trained_from}
    assert set(RECIPES) == set(trained)
    assert {name for entry in trained.values() for name in entry.trained_from} <= set(CATALOG)


def test_the_head_has_as_many_classes_as_the_image_set(backbone, tmp_path):
    (tmp_path / "out").mkdir()
    sources = {"dinov2": backbone, "mnist": sets(tmp_path, 60, side=20)}
    dinov2_mnist(sources, tmp_path / "out")
    assert load(str(tmp_path / "out")).d_vocab == 7


def test_a_backbone_without_its_head_is_refused_by_load(backbone):
    from layerleap.errors import ModelRefused

    with pytest.raises(ModelRefused, match="lacks 2 weights that Dinov2ForImageClassification"):
        load(str(backbone))
    assert build("dinov2").classifier.weight.shape == (7, 48)


def test_a_head_for_constant_coordinates_is_finite():
    states = torch.randn(40, 6)
    states[:, 2] = 3.0
    weight, bias = fit_head(states, torch.arange(40) % 4, 4)
    assert weight.isfinite().all()
    assert bias.isfinite().all()
