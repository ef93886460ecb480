import gzip

import numpy as np
import pytest
from PIL import Image

from layerleap.errors import BadMedia
from layerleap.zoo.images import (
    ImageSet,
    is_held_out,
    pixel_values,
    read_csv,
    read_npz,
)
from media import image_processor, images, sets


def test_the_side_of_an_image_depends_only_on_its_pixels():
    every = ImageSet(images(400), np.arange(400))
    fit, held_out = every.side(False), every.side(True)
    assert len(fit) + len(held_out) == 400
    assert 60 < len(held_out) < 140
    assert not set(fit.labels) & set(held_out.labels)
    backwards = ImageSet(every.images[::-1], every.labels[::-1])
    assert set(backwards.side(True).labels) == set(held_out.labels)


def test_a_smaller_share_holds_out_no_other_images():
    few = [is_held_out(image, 0.1) for image in images(300)]
    more = [is_held_out(image, 0.3) for image in images(300)]
    assert 10 < sum(few) < sum(more)
    assert all(b for a, b in zip(few, more, strict=True) if a)
    assert [is_held_out(image, 0.3, "other") for image in images(300)] != more


def test_an_image_of_another_shape_is_another_image():
    flat = images(1)[0]
    sides = [
        is_held_out(flat.reshape(shape), 0.5, str(n))
        for n in range(40)
        for shape in ((12, 12), (9, 16))
    ]
    assert sides[::2] != sides[1::2]


def test_a_set_is_read_with_its_labels_or_without(tmp_path):
    image_set = read_npz(sets(tmp_path))
    assert image_set.images.shape == (30, 12, 12)
    assert sorted(set(image_set.labels)) == list(range(7))
    np.savez(tmp_path / "bare.npz", images=images(3))
    assert read_npz(tmp_path / "bare.npz").labels.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pictures": images(3)}, "contains pictures; expected an array 'images'"),
        ({"images": images(3).astype(float)}, r"are float64 of shape \(3, 12, 12\)"),
        ({"images": images(3)[0]}, r"of shape \(12, 12\)"),
        ({"images": images(3)[:0]}, r"of shape \(0, 12, 12\)"),
        ({"images": images(3), "labels": np.zeros(2, int)}, "one integer for each of the 3 images"),
        ({"images": images(3), "labels": np.zeros(3)}, "labels are float64"),
        ({"images": np.array([object()])}, "not a readable"),
    ],
)
def test_a_set_of_another_shape_is_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(BadMedia, match=message) as caught:
        read_npz(tmp_path / "bad.npz")
    assert "\n" not in str(caught.value)


def test_a_damaged_set_is_refused(tmp_path):
    path = sets(tmp_path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(BadMedia, match="not a readable"):
        read_npz(path)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize("head", ["", "label first", "label last"])
def test_a_table_has_one_image_per_line_and_its_class_last_or_in_the_column_label(
    tmp_path, suffix, head
):
    pixels, labels = images(4, side=3).reshape(4, 9), np.array([3, 0, 1, 2])
    first = head == "label first"
    table = np.column_stack([labels, pixels] if first else [pixels, labels])
    names = [f"p{n}" for n in range(9)]
    named = ",".join(["label", *names] if first else [*names, "label"]) + "\n"
    lines = (named if head else "") + "\n".join(",".join(map(str, row)) for row in table)
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(lines.encode()) if suffix.endswith("gz") else lines.encode())
    image_set = read_csv(path)
    assert np.array_equal(image_set.images.reshape(4, 9), pixels)
    assert image_set.labels.tolist() == [3, 0, 1, 2]


def test_a_table_of_square_images_alone_has_no_classes(tmp_path):
    (tmp_path / "x.csv").write_text("0,1,2,3\n4,5,6,7\n")
    image_set = read_csv(tmp_path / "x.csv")
    assert image_set.images.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert image_set.labels.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3\n", "3 columns; expected the pixels of a square image"),
        ("1,2,300,4\n", "pixels from 0 to 255"),
        ("1,2,-3,4\n", "pixels from 0 to 255"),
        ("1,2,x,4\n1,2,3,4\n1,2,y,4\n", "pixels from 0 to 255"),
        ("1,2,3,4\n1,2\n", "pixels from 0 to 255"),
    ],
)
def test_a_table_of_another_shape_is_refused(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(BadMedia, match=message):
        read_csv(tmp_path / "x.csv")


def test_pixels_come_from_the_processor():
    grey = images(2, side=16)
    colour = np.repeat(grey[:1], 3, axis=0).transpose(1, 2, 0)
    some = [grey[0], colour, Image.fromarray(grey[0]), grey[1]]
    pixels = pixel_values(image_processor(), some, (3, 16, 16))
    assert pixels.shape == (4, 3, 16, 16)
    assert pixels[0].equal(pixels[1])
    assert pixels[0].equal(pixels[2])
    assert pixels[0, 0].allclose(2 * pixels.new_tensor(grey[0] / 255.0) - 1, atol=1e-6)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros(5, np.uint8), r"uint8 of shape \(5,\)"),
        (np.zeros((5, 5)), r"float64 of shape \(5, 5\)"),
        (np.zeros((5, 5, 2), np.uint8), r"expected \(height, width\) or \(height, width, 3\)"),
        (np.zeros((0, 5), np.uint8), r"of shape \(0, 5\)"),
        (np.zeros((3, 5, 5), np.uint8), r"expected \(height, width\) or \(height, width, 3\)"),
    ],
)
def test_an_image_of_the_wrong_shape_is_refused(image, message):
    with pytest.raises(BadMedia, match=message):
        pixel_values(image_processor(), [image], (3, 16, 16))


def test_a_processor_of_another_model_is_refused():
    with pytest.raises(
        BadMedia, match="gives images of 3 x 16 x 16, but the model expects 3 x 28 x"
    ):
        pixel_values(image_processor(), images(1), (3, 28, 28))
