"""Images from data sets, files and folders, as batches with the position to read.

In: bundled images, scikit-learn's digits, a folder, a .npz or .csv file, or image objects; and an
image classifier with its processor.
Out: `Batch`es like those of text: each image is one document, one text and one row.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerleap.errors import BadMedia, BadSettings
from layerleap.extras import library
from layerleap.files import files_under
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch, Sampling, TextCounts
from layerleap.stream.places import SUFFIXES, check_images
from layerleap.stream.split import Side, on_side
from layerleap.zoo.catalog import IMAGE_NAMES
from layerleap.zoo.download import fetch
from layerleap.zoo.images import (
    ImageSet,
    image_shape,
    is_held_out,
    pixel_values,
    read_csv,
    read_npz,
)

EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


@dataclass(frozen=True, eq=False)
class LabelledImage:
    """One image: its number in the source, its pixels, and its class (-1 if unknown)."""

    number: int
    image: np.ndarray[Any, Any]  # uint8 (height, width), or (height, width, 3)
    label: int = -1


def iter_images(
    source: Any, *, classes: Mapping[str, int] | None = None, seed: int = 0
) -> Iterator[LabelledImage]:
    """The images of `source` in random order, because data sets are often sorted by class.

    Args:
        source: "mnist" (bundled); "digits" (scikit-learn's); a .npz file with "images" and
            optionally "labels"; a .csv file, one image per line with its class last; a folder of
            images, optionally with one subfolder per class; or arrays or PIL images.
        classes: the class number for each subfolder name.
        seed: seed of the order.
    """
    if not isinstance(source, str | Path):
        return _from_images(source)
    path = Path(source).expanduser()
    if str(source) in IMAGE_NAMES:
        return _shuffled(read_npz(fetch(str(source))), seed)
    if source == "digits":
        return _shuffled(_digits(), seed)
    check_images(str(source))
    if path.is_dir():
        return _from_folder(path, classes or {}, seed)
    if path.suffix == ".npz":
        return _shuffled(read_npz(path), seed)
    if ".csv" in path.suffixes[-2:]:
        return _shuffled(read_csv(path), seed)
    return iter([LabelledImage(0, _read_image(path))])


def image_batches(
    transformer: Transformer,
    source: Any,
    sampling: Sampling | None = None,
    *,
    side: Side = "held-out",
    n_texts: int | None = None,
    per_batch: int = 16,
    text_counts: TextCounts | None = None,
    ridge_share: float = 0.0,
) -> Iterator[Batch]:
    """Batches of images, each with the one position whose state reaches the logits.

    The arguments are those of `batches_of`. Of `sampling`, only `held_out` and `seed` (of the
    order) are used. Models trained by the zoo never saw the images that the default share holds
    out.
    """
    sampling = sampling or Sampling()
    text_counts = text_counts if text_counts is not None else TextCounts()
    _require_images(transformer)
    classes = dict(getattr(transformer.model.config, "label2id", None) or {})
    side_images = (
        labelled
        for labelled in iter_images(source, classes=classes, seed=sampling.seed)
        if on_side(side, is_held_out(labelled.image, sampling.held_out))
        and text_counts.admits(labelled.number, labelled.image.tobytes())
    )
    images, index, n_positions = islice(side_images, n_texts), 0, 0
    while chunk := list(islice(images, per_batch)):
        shape = image_shape(transformer.model.config)
        pixels = pixel_values(transformer.processor, [labelled.image for labelled in chunk], shape)
        if not n_positions:  # this pass ends before the first block
            captured = transformer.capture({"pixel_values": pixels[:1]}, layers=[0])
            n_positions = captured.states[0].shape[1]
        for labelled in chunk:
            if labelled.label >= transformer.d_vocab:
                raise BadMedia(
                    f"image {labelled.number} has class {labelled.label}, but the model knows "
                    f"classes 0 to {transformer.d_vocab - 1}; use images of its classes"
                )
            text_counts.documents += 1
            text_counts.use(labelled.number)
            shape_and_pixels = f"{labelled.image.shape}".encode() + labelled.image.tobytes()
            text_counts.note(n_positions, 1, shape_and_pixels)
        keep = transformer.pooled(torch.ones(len(chunk), n_positions))
        yield Batch(
            index,
            {"pixel_values": pixels},
            keep,
            documents=torch.tensor([labelled.number for labelled in chunk]),
            positions=keep.int().argmax(1),
            ridge_rows=torch.tensor([is_held_out(i.image, ridge_share, "ridge") for i in chunk]),
            n_texts=len(chunk),
            n_tokens=keep.numel(),
            gold=torch.tensor([labelled.label for labelled in chunk]),
        )
        index += 1


def _require_images(transformer: Transformer) -> None:
    name = transformer.identity.name
    if transformer.kind != "image-class":
        raise BadSettings(f"{name} cannot read images; expected an image classifier")
    if transformer.processor is None:
        raise BadMedia(
            f"{name} has no image processor; save one next to the model, pass processor=..., or "
            "install pillow"
        )


def _shuffled(images: ImageSet, seed: int) -> Iterator[LabelledImage]:
    order = list(range(len(images)))
    random.Random(seed).shuffle(order)
    for number in order:
        yield LabelledImage(number, images.images[number], int(images.labels[number]))


def _digits() -> ImageSet:
    """scikit-learn's handwritten digits, 8 x 8, rescaled from 0..16 to 0..255."""
    digits = library("sklearn.datasets", "learn", "its digits need it").load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return ImageSet(images, digits.target)


def _from_images(images: Iterable[Any]) -> Iterator[LabelledImage]:
    for number, image in enumerate(images):
        yield image if isinstance(image, LabelledImage) else LabelledImage(number, _pixels(image))


def _from_folder(folder: Path, classes: Mapping[str, int], seed: int) -> Iterator[LabelledImage]:
    files = files_under(folder, lambda path: path.suffix.lower() in SUFFIXES)
    if not files:
        raise BadMedia(f"the folder {folder} contains no image; expected {', '.join(SUFFIXES)}")
    labels = [_label(path, folder, classes) for path in files]  # check all before reading any
    numbers = list(range(len(files)))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        yield LabelledImage(number, _read_image(files[number]), labels[number])


def _label(path: Path, folder: Path, classes: Mapping[str, int]) -> int:
    """The class of an image according to its subfolder; -1 if it is in none."""
    name = path.relative_to(folder).parts[0]
    if path.parent == folder:
        return -1
    if name in classes:
        return int(classes[name])
    known = ", ".join(list(classes)[:10]) or "it has no named ones"
    raise BadMedia(
        f"the subfolder {name} of {folder} is not one of the model's classes ({known}); name "
        "subfolders after classes, or use no subfolders"
    )


def _read_image(path: Path) -> np.ndarray[Any, Any]:
    Image = library("PIL.Image", "bundled")
    try:
        with Image.open(path) as image:
            return _pixels(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadMedia(f"{path} is not a readable image ({error}); check the file") from error


def _pixels(image: Any) -> np.ndarray[Any, Any]:
    if isinstance(image, np.ndarray):
        return image
    if image.mode not in EIGHT_BITS:
        raise BadMedia(f"an image has mode {image.mode}; expected 8 bits per colour")
    return np.asarray(image if image.mode == "L" else image.convert("RGB"))
