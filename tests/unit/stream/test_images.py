from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from layerleap.errors import BadMedia, BadSettings
from layerleap.lens.lens import Lens
from layerleap.lens.scores import score
from layerleap.maps.fit import fit
from layerleap.stream.batches import batches_of, modality
from layerleap.stream.examples import Sampling, TextCounts
from layerleap.stream.images import LabelledImage, image_batches, iter_images
from layerleap.zoo.catalog import CATALOG
from layerleap.zoo.images import is_held_out
from media import images, seeing, sets
from tiny_models import tiny


@pytest.fixture(scope="module")
def vit():
    return seeing()


def numbers(source, **more):
    return [labelled.number for labelled in iter_images(source, **more)]


def test_a_set_comes_whole_and_in_random_order_that_the_seed_decides(tmp_path):
    path = sets(tmp_path)
    images_read = list(iter_images(path))
    assert sorted(labelled.number for labelled in images_read) == list(range(30))
    labels = [labelled.label for labelled in images_read]
    assert labels != sorted(labels)
    with np.load(path) as arrays:
        for labelled in images_read:
            assert np.array_equal(labelled.image, arrays["images"][labelled.number])
            assert labelled.label == arrays["labels"][labelled.number]
    assert numbers(path) == numbers(path, seed=0) != numbers(path, seed=1)


def test_the_digits_of_scikit_learn_come_in_eight_bits():
    images_read = list(iter_images("digits"))
    assert len(images_read) == 1797
    assert {labelled.label for labelled in images_read} == set(range(10))
    assert images_read[0].image.shape == (8, 8)
    assert max(labelled.image.max() for labelled in images_read) == 255


def test_bundled_images_come_from_the_cache(empty_cache):
    path = CATALOG["mnist"].path
    path.parent.mkdir(parents=True)
    sets(path.parent).rename(path)
    assert sorted(numbers("mnist")) == list(range(30))


def test_a_folder_of_images_is_read_with_a_folder_per_class(tmp_path):
    some = images(6)
    for number, name in enumerate(("3/a.png", "3/b.jpg", "5/deep/c.png", "d.png", ".hidden/e.png")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(some[number]).save(tmp_path / name)
    (tmp_path / "3" / "notes.txt").write_text("no image")
    images_read = sorted(iter_images(tmp_path, classes={"3": 3, "5": 5}), key=lambda p: p.number)
    assert [labelled.label for labelled in images_read] == [3, 3, 5, -1]
    assert np.array_equal(images_read[0].image, some[0])


@pytest.mark.parametrize("mode", ["1", "P", "RGBA", "CMYK", "LA"])
def test_images_of_other_modes_become_plain_colours(tmp_path, mode):
    name = "x.tif" if mode == "CMYK" else "x.png"
    Image.fromarray(images(1)[0]).convert("RGB").convert(mode).save(tmp_path / name)
    (labelled,) = iter_images(tmp_path / name)
    assert labelled.image.shape == (12, 12, 3)
    assert labelled.image.dtype == np.uint8


def test_the_same_pixels_are_on_the_same_side_whatever_their_source(tmp_path, vit):
    some = images(20)
    np.savez(tmp_path / "set.npz", images=some)
    (tmp_path / "folder").mkdir()
    for number, image in enumerate(some):
        Image.fromarray(image).save(tmp_path / "folder" / f"{number:02d}.png")
    sources = (tmp_path / "set.npz", tmp_path / "folder", list(some), map(Image.fromarray, some))
    sides = [
        sorted(n for b in image_batches(vit, source, side="held-out") for n in b.documents.tolist())
        for source in sources
    ]
    assert sides[0] == [n for n in range(20) if is_held_out(some[n])]
    assert sides.count(sides[0]) == len(sides)


def test_batches_have_one_row_per_image_with_its_class(tmp_path, vit):
    path = sets(tmp_path)
    batches = list(image_batches(vit, path, side="both", per_batch=8))
    assert [batch.n_texts for batch in batches] == [8, 8, 8, 6]
    assert [batch.index for batch in batches] == [0, 1, 2, 3]
    expected = {labelled.number: labelled.label for labelled in iter_images(path)}
    for batch in batches:
        captured = vit.capture(batch.inputs, keep=batch.keep, logits=True)
        assert batch.keep.shape == (batch.n_texts, 17)  # 16 patches and CLS
        assert batch.keep.sum(1).tolist() == [1] * batch.n_texts
        assert batch.positions.tolist() == [0] * batch.n_texts
        assert [expected[n] for n in batch.documents.tolist()] == batch.gold.tolist()
        assert captured.states[3].shape == (batch.n_texts, 24)
        torch.testing.assert_close(vit.logits(captured.states[3]), captured.logits)


def test_sides_are_disjoint_and_n_images_takes_the_first(tmp_path, vit):
    path = sets(tmp_path)

    def documents(**more):
        return [n for b in image_batches(vit, path, **more) for n in b.documents.tolist()]

    fit, held_out = documents(side="fit"), documents(side="held-out")
    assert sorted(fit + held_out) == list(range(30))
    assert fit[:5] == documents(side="fit", n_texts=5)
    assert documents(side="held-out") == documents(sampling=None)
    none_held = Sampling(held_out=0.0)
    assert len(documents(sampling=none_held, side="fit")) == 30


def test_a_row_does_not_depend_on_its_batch(tmp_path, vit):
    path = sets(tmp_path)

    def states(per_batch):
        batches = image_batches(vit, path, side="both", per_batch=per_batch)
        return torch.cat([vit.capture(b.inputs, keep=b.keep).states[3] for b in batches])

    torch.testing.assert_close(states(1), states(7), rtol=1e-4, atol=1e-5)


def test_some_images_of_a_batch_are_a_batch(tmp_path, vit):
    (batch,) = image_batches(vit, sets(tmp_path), side="both", per_batch=30)
    chosen = torch.arange(30) % 3 == 0
    some = batch.texts(chosen)
    assert some.n_texts == 10
    assert torch.equal(some.documents, batch.documents[chosen])
    assert torch.equal(some.gold, batch.gold[chosen])
    captured = vit.capture(some.inputs, keep=some.keep).states[2]
    whole = vit.capture(batch.inputs, keep=batch.keep).states[2][chosen]
    torch.testing.assert_close(captured, whole, rtol=1e-4, atol=1e-5)


def test_images_are_scored_like_texts_and_shortcuts_fitted_on_them(tmp_path, vit):
    path = sets(tmp_path, 120)
    bank = fit(vit, path, Sampling(), ridge="auto")
    assert bank.data["texts"] == bank.data["rows"] == 120 - sum(map(is_held_out, images(120)))
    assert bank.data["ridge_rows"] > 0
    batches = batches_of(vit, path, Sampling(), side="held-out")
    scores = score(vit, {"logit": Lens(vit), "linear": Lens(vit, bank)}, batches)
    assert scores.check.agreement == 1.0
    assert (scores.rank["linear"][:, -1] == 0).all()
    assert scores.rank["logit"].shape == (sum(map(is_held_out, images(120))), 4)


def test_what_was_read_is_counted_and_fingerprinted(tmp_path, vit):
    def text_counts(**more):
        text_counts = TextCounts()
        list(image_batches(vit, sets(tmp_path, **more), side="both", text_counts=text_counts))
        return text_counts.to_dict()

    assert {text_counts()[key] for key in ("documents", "texts", "rows")} == {30}
    assert text_counts() == text_counts()
    assert text_counts()["fingerprint"] != text_counts(seed=1)["fingerprint"]


def test_a_models_modality_is_recognised(vit):
    assert modality(vit) == "images"
    assert modality(tiny("llama")) == "text"


def test_an_unknown_class_is_minus_one(vit):
    (batch,) = image_batches(vit, list(images(3)), side="both")
    assert batch.gold.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda f: f / "nothing",
            "there is no file or folder .*; image sets by name are mnist, digits",
        ),
        (lambda f: f, "contains no image; expected .png"),
        (lambda f: (f / "x.txt").write_text("x") and f / "x.txt", "x.txt is not an image"),
        (lambda f: (f / "x.png").write_text("no") and f / "x.png", "x.png is not a readable image"),
        (lambda f: _half(f / "x.png"), "x.png is not a readable image .*truncated"),
        (lambda f: _deep(f / "x.png"), "mode I;16; expected 8 bits"),
        (lambda f: _in_class(f, "cat"), "cat of .* is not one of the model's classes .0, 1, 2"),
    ],
)
def test_unreadable_images_are_reported_in_one_line(tmp_path, vit, make, message):
    with pytest.raises(BadMedia, match=message) as caught:
        list(image_batches(vit, make(tmp_path), side="both"))
    assert "\n" not in str(caught.value)


def _half(path):
    Image.fromarray(images(1, side=64)[0]).save(path)
    path.write_bytes(path.read_bytes()[:600])
    return path


def _deep(path):
    Image.fromarray(images(1)[0].astype(np.uint16)).save(path)
    return path


def _in_class(folder, name):
    (folder / name).mkdir()
    Image.fromarray(images(1)[0]).save(folder / name / "x.png")
    return folder


def test_a_class_that_the_model_does_not_know_is_refused(vit):
    with pytest.raises(BadMedia, match="has class 7, but the model knows classes 0 to 6"):
        list(image_batches(vit, [LabelledImage(0, images(1)[0], 7)], side="both"))


def test_an_image_of_the_wrong_shape_is_refused(vit):
    with pytest.raises(BadMedia, match=r"shape \(2, 12, 12\)"):
        list(image_batches(vit, [images(2)], side="both"))


def test_models_that_do_not_read_images_are_refused(vit):
    with pytest.raises(
        BadSettings, match="tiny-llama cannot read images; expected an image classifier"
    ):
        list(image_batches(tiny("llama"), "digits"))
    blind = seeing()
    blind.processor = None
    with pytest.raises(BadMedia, match="tiny-vit has no image processor"):
        list(image_batches(blind, "digits"))


def test_a_processor_of_another_size_is_refused(vit):
    other = seeing()
    other.processor = type(vit.processor)(size={"height": 20, "width": 20})
    with pytest.raises(BadMedia, match="gives images of 3 x 20 x 20, but the model expects 3 x 16"):
        list(image_batches(other, "digits"))


def test_a_labelled_image_is_used_as_it_is(vit):
    given = LabelledImage(17, images(1)[0], 2)
    (batch,) = image_batches(vit, [given, replace(given, number=18, label=-1)], side="both")
    assert batch.documents.tolist() == [17, 18]
    assert batch.gold.tolist() == [2, -1]


def test_a_mistyped_side_of_images_is_refused(vit):
    with pytest.raises(BadSettings, match=r"side is 'heldout'; .* did you mean 'held-out'"):
        next(batches_of(vit, images(4), Sampling(), side="heldout"))
