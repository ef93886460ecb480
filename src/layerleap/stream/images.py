"""Images: from sets, files and folders to batches with the position to read.

In: bundled images, scikit-learn's digits, a folder, a .npz or .csv file, or images themselves;
and an image classifier with its processor.
Out: `Batch`es like those of texts: each image is a document, a text, and one row to read.
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
from layerleap.models.discovery.probe import ready
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch, Census, Sampling
from layerleap.stream.split import Side
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

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SETS = (*IMAGE_NAMES, "digits")
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


@dataclass(frozen=True, eq=False)
class LabelledImage:
    """One image: where it stands in its source, its pixels, and its class if that is known."""

    number: int
    image: np.ndarray[Any, Any]  # uint8 (height, width), or (height, width, 3)
    label: int = -1


def iter_images(
    source: Any, *, classes: Mapping[str, int] | None = None, seed: int = 0
) -> Iterator[LabelledImage]:
    """The images of `source` in random order: sets are often sorted by class.

    Args:
        source: "mnist" (bundled); "digits" (scikit-learn's); a .npz file with "images" and
            perhaps "labels"; a .csv file, one image a line and its class last; a folder of
            images, perhaps in one folder per class; or images, as arrays or PIL's.
        classes: numbers of the classes by name, for a folder's folders.
        seed: of the order.
    """
    if not isinstance(source, str | Path):
        return _from_images(source)
    path = Path(source).expanduser()
    if str(source) in IMAGE_NAMES:
        return _shuffled(read_npz(fetch(str(source))), seed)
    if source == "digits":
        return _shuffled(_digits(), seed)
    if path.is_dir():
        return _from_folder(path, classes or {}, seed)
    if not path.is_file():
        raise BadMedia(f"there is no file or folder {source}; sets of images are {', '.join(SETS)}")
    if path.suffix == ".npz":
        return _shuffled(read_npz(path), seed)
    if ".csv" in path.suffixes[-2:]:
        return _shuffled(read_csv(path), seed)
    if path.suffix.lower() in SUFFIXES:
        return iter([LabelledImage(0, _read_image(path))])
    raise BadMedia(
        f"{source} is no image; {', '.join(SUFFIXES)}, .npz, .csv or a folder was wanted"
    )


def image_batches(
    transformer: Transformer,
    source: Any,
    sampling: Sampling | None = None,
    *,
    side: Side = "held-out",
    n_images: int | None = None,
    per_batch: int = 16,
    census: Census | None = None,
    ridge_share: float = 0.0,
) -> Iterator[Batch]:
    """Batches of images, each with the one position whose state reaches the logits.

    Args:
        transformer: an image classifier; its processor prepares the images.
        source: anything `iter_images` reads.
        sampling: of it `held_out` and `seed` (of the order) count. Models made here were fitted
            on what is not held out at its default share.
        side: images to fit on, images held out, or both.
        n_images: stop after that many.
        per_batch: images in one forward pass.
        census: filled in as images go by.
        ridge_share: share of the images to fit on that are held back to choose a ridge.
    """
    sampling = sampling or Sampling()
    census = census if census is not None else Census()
    _require_images(transformer)
    classes = dict(getattr(transformer.model.config, "label2id", None) or {})
    pictures = (
        picture
        for picture in iter_images(source, classes=classes, seed=sampling.seed)
        if side == "both" or is_held_out(picture.image, sampling.held_out) == (side == "held-out")
    )
    some, index, n_positions = islice(pictures, n_images), 0, 0
    while chunk := list(islice(some, per_batch)):
        shape = image_shape(transformer.model.config)
        pixels = pixel_values(transformer.processor, [p.image for p in chunk], shape)
        inputs = ready(transformer.model, {"pixel_values": pixels})
        if not n_positions:  # the pass ends before the first block
            seen = transformer.capture({"pixel_values": pixels[:1]}, layers=[0])
            n_positions = seen.states[0].shape[1]
        for picture in chunk:
            _note(census, picture, n_positions)
        yield _batch(transformer, chunk, inputs, n_positions, index, ridge_share)
        index += 1


def _batch(
    transformer: Transformer,
    chunk: list[LabelledImage],
    inputs: dict[str, Any],
    n_positions: int,
    index: int,
    ridge_share: float,
) -> Batch:
    for picture in chunk:
        if picture.label >= transformer.d_vocab:
            raise BadMedia(
                f"image {picture.number} is of class {picture.label}, and the model knows classes "
                f"0 to {transformer.d_vocab - 1}; give images of its classes"
            )
    keep = torch.zeros(len(chunk), n_positions, dtype=torch.bool)
    position = transformer.picked_position or 0
    keep[:, position] = True
    held_back = [is_held_out(picture.image, ridge_share, "ridge") for picture in chunk]
    return Batch(
        index, inputs, keep, torch.tensor([picture.number for picture in chunk]),
        torch.full((len(chunk),), position), torch.tensor(held_back), len(chunk), keep.numel(),
        torch.tensor([picture.label for picture in chunk]),
    )  # fmt: skip


def _note(census: Census, picture: LabelledImage, n_positions: int) -> None:
    census.documents += 1
    census.texts += 1
    census.tokens += n_positions
    census.rows += 1
    census.digest.update(f"{picture.image.shape}".encode() + picture.image.tobytes())


def _require_images(transformer: Transformer) -> None:
    name = transformer.identity.name
    if transformer.model.main_input_name != "pixel_values" or transformer.picked_position is None:
        raise BadSettings(f"{name} is no image classifier, so it cannot read images")
    if transformer.processor is None:
        raise BadMedia(
            f"{name} has no image processor; save one beside the model, pass processor=..., or "
            "install pillow"
        )


def _shuffled(pictures: ImageSet, seed: int) -> Iterator[LabelledImage]:
    order = list(range(len(pictures)))
    random.Random(seed).shuffle(order)
    for number in order:
        yield LabelledImage(number, pictures.images[number], int(pictures.labels[number]))


def _digits() -> ImageSet:
    """scikit-learn's handwritten digits: 8 x 8, from 0 to 16."""
    found = library("sklearn.datasets", "learn", "its digits need it").load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)
    return ImageSet(images, found.target)


def _from_images(images: Iterable[Any]) -> Iterator[LabelledImage]:
    for number, image in enumerate(images):
        yield image if isinstance(image, LabelledImage) else LabelledImage(number, _pixels(image))


def _from_folder(folder: Path, classes: Mapping[str, int], seed: int) -> Iterator[LabelledImage]:
    inside = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    files = [p for p in inside if not any(x.startswith(".") for x in p.relative_to(folder).parts)]
    if not files:
        raise BadMedia(f"the folder {folder} holds no image; {', '.join(SUFFIXES)} are wanted")
    labels = [_label(path, folder, classes) for path in files]  # all before any is read
    numbers = list(range(len(files)))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        yield LabelledImage(number, _read_image(files[number]), labels[number])


def _label(path: Path, folder: Path, classes: Mapping[str, int]) -> int:
    """The class of an image, by the folder it lies in; unknown if it lies in none."""
    name = path.relative_to(folder).parts[0]
    if path.parent == folder:
        return -1
    if name in classes:
        return int(classes[name])
    known = ", ".join(list(classes)[:10]) or "none by name"
    raise BadMedia(
        f"the folder {name} in {folder} is none of the model's classes ({known}); name folders "
        "after classes, or put the images into no folder"
    )


def _read_image(path: Path) -> np.ndarray[Any, Any]:
    Image = library("PIL.Image", "bundled")

    try:
        with Image.open(path) as image:
            return _pixels(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadMedia(f"{path} cannot be read as an image ({error}); check the file") from error


def _pixels(image: Any) -> np.ndarray[Any, Any]:
    if isinstance(image, np.ndarray):
        return image
    if image.mode not in EIGHT_BITS:
        raise BadMedia(f"an image has pixels of kind {image.mode}; 8 bits a colour were wanted")
    return np.asarray(image if image.mode == "L" else image.convert("RGB"))
