"""Labelled images: reading them, splitting them, and turning them into a model's input.

In: 8-bit images, grey or in colour, and the model's processor.
Out: `ImageSet`s read from files and split into two sides; pixel values for a forward pass.
"""

import gzip
import math
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadMedia, ModelRefused, first_line
from layerleap.extras import library

HELD_OUT = 0.25  # share of the images that models trained here are not fitted on


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images of one size, and the class of each."""

    images: np.ndarray[Any, Any]  # uint8 (image, height, width) or (image, height, width, colour)
    labels: np.ndarray[Any, Any]  # (image,); -1 if unknown

    def __len__(self) -> int:
        return len(self.images)

    def side(self, held_out: bool, share: float = HELD_OUT) -> "ImageSet":
        """The images that are held out, or those that are not."""
        chosen = np.array([is_held_out(image, share) == held_out for image in self.images])
        return ImageSet(self.images[chosen], self.labels[chosen])


def is_held_out(image: np.ndarray[Any, Any], share: float = HELD_OUT, salt: str = "") -> bool:
    """True if an image is kept for testing; depends on its pixels only, so copies stay together.

    There is no seed on purpose: an image that a model of the zoo was trained on is never held
    out, and one held out at a small share is held out at every larger one. A different salt
    gives an independent choice.
    """
    data = f"{salt}{image.shape}".encode() + image.tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest()) < share * 2**64


def read_csv(path: Path) -> ImageSet:
    """The square images of a .csv or .csv.gz file, one per line: pixels row by row, and the class.

    The class is in the column that the header calls "label", by default the last one. If the
    number of columns is a square number, there are no classes.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            first = lines.readline().strip().split(",")
            named = any(word.strip().isalpha() for word in first)
            if not named:
                lines.seek(0)
            table = np.loadtxt(lines, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, ValueError, OverflowError) as error:
        raise BadMedia(
            f"{path} is not a readable table of pixels from 0 to 255 ({error}); check the file"
        ) from error
    columns = table.shape[1]
    if math.isqrt(columns) ** 2 == columns:
        labels = np.full(len(table), -1)
    elif math.isqrt(columns - 1) ** 2 == columns - 1:
        place = first.index("label") if named and "label" in first else columns - 1
        labels, table = table[:, place].astype(int), np.delete(table, place, axis=1)
    else:
        raise BadMedia(
            f"{path} has {columns} columns; expected the pixels of a square image, optionally "
            "followed by its class"
        )
    side = math.isqrt(table.shape[1])
    return ImageSet(table.reshape(-1, side, side), labels)


def read_npz(path: Path) -> ImageSet:
    """The images and labels of a .npz file; missing labels become -1."""
    try:
        # Opened here because numpy does not close a file that it cannot read.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise BadMedia(f"{path} is not a readable .npz file ({error}); check the file") from error
    if "images" not in arrays:
        names = ", ".join(arrays) or "no arrays"
        raise BadMedia(
            f"{path} contains {names}; expected an array 'images' and optionally 'labels'"
        )
    images = arrays["images"]
    labels = arrays.get("labels", np.full(len(images), -1))
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not len(images):
        raise BadMedia(
            f"{path}: images are {images.dtype} of shape {images.shape}; expected uint8 of shape "
            "(image, height, width) or (image, height, width, colour)"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise BadMedia(
            f"{path}: labels are {labels.dtype} of shape {labels.shape}; expected one integer for "
            f"each of the {len(images)} images"
        )
    return ImageSet(images, labels)


def pixel_values(processor: Any, images: Iterable[Any], shape: tuple[int, int, int]) -> Tensor:
    """Arrays or PIL images as model input: (image, channel, height, width).

    Args:
        processor: the model's own image processor.
        images: of any size; the processor resizes and crops.
        shape: channels, height and width that the model expects.
    """
    pil_images = [_to_pil(image).convert("L" if shape[0] == 1 else "RGB") for image in images]
    try:
        pixels = processor(pil_images, return_tensors="pt")["pixel_values"]
    except (ValueError, TypeError) as error:
        raise BadMedia(
            f"the model's image processor failed ({first_line(error)[:160]}); check the images"
        ) from error
    if tuple(pixels.shape[1:]) != shape:
        raise BadMedia(
            f"the processor gives images of {_by(pixels.shape[1:])}, but the model expects "
            f"{_by(shape)} (channels, height, width); load the model's own processor"
        )
    return torch.as_tensor(pixels)


def _to_pil(image: Any) -> Any:
    Image = library("PIL.Image", "bundled")
    if isinstance(image, Image.Image):
        return image
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or 0 in image.shape:
        raise BadMedia(
            f"an image is {image.dtype} of shape {image.shape}; expected uint8 of shape "
            "(height, width) or (height, width, 3)"
        )
    if image.ndim == 3 and image.shape[2] not in (3, 4):
        raise BadMedia(
            f"an image has shape {image.shape}; expected (height, width) or (height, width, 3)"
        )
    return Image.fromarray(image)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model expects; `ModelRefused` if unknown."""
    config = getattr(config, "vision_config", config)  # of a model that reads texts as well
    size, channels = (getattr(config, name, None) for name in ("image_size", "num_channels"))
    if size is None or channels is None:
        raise ModelRefused(
            f"{type(config).__name__} names no {'image_size' if size is None else 'num_channels'}, "
            "so no image can be made for it; expected a vision transformer, which reads images of "
            "one size"
        )
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return channels, height, width
