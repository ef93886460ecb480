"""Pictures: arrays with their classes, the side each lies on, and what a model is given of them.

In: 8-bit images, grey or in colour, and the model's processor.
Out: `Pictures` of a file, cut into two sides; and pixels as the model's forward pass takes them.
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

from layerleap.errors import BadMedia
from layerleap.extras import library

HELD_OUT = 0.25  # share of the images on which the models that are made here are not fitted


@dataclass(frozen=True, eq=False)
class Pictures:
    """Images of one size, and the class of each."""

    images: np.ndarray[Any, Any]  # uint8 (image, height, width), or with a last axis of colours
    labels: np.ndarray[Any, Any]  # (image,)

    def __len__(self) -> int:
        return len(self.images)

    def side(self, held_out: bool, share: float = HELD_OUT) -> "Pictures":
        """Those fitted on, or those held out."""
        chosen = np.array([is_held_out(image, share) == held_out for image in self.images])
        return Pictures(self.images[chosen], self.labels[chosen])


def is_held_out(image: np.ndarray[Any, Any], share: float = HELD_OUT, salt: str = "") -> bool:
    """Whether an image is kept for testing: by its pixels alone, so copies stay on one side.

    There is no seed on purpose: what a model made here was fitted on is never held out, and
    what is held out at a small share is so at every larger one. Another salt is another choice.
    """
    data = f"{salt}{image.shape}".encode() + image.tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest()) < share * 2**64


def read_table(path: Path) -> Pictures:
    """The images of a .csv file (or .gz of it), one a line: pixels row by row, and the class.

    The class is the column that a first line calls "label", else the last; no class if the
    number of columns is that of a square image. Images are square.
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
            f"{path} cannot be read as a table of pixels from 0 to 255 ({error}); check the file"
        ) from error
    columns = table.shape[1]
    if math.isqrt(columns) ** 2 == columns:
        labels = np.full(len(table), -1)
    elif math.isqrt(columns - 1) ** 2 == columns - 1:
        place = first.index("label") if named and "label" in first else columns - 1
        labels, table = table[:, place].astype(int), np.delete(table, place, axis=1)
    else:
        raise BadMedia(
            f"{path} has {columns} columns; those of a square image were wanted, or one more for "
            "its class"
        )
    side = math.isqrt(table.shape[1])
    return Pictures(table.reshape(-1, side, side), labels)


def read_pictures(path: Path) -> Pictures:
    """The images and labels of a .npz file; without labels they are -1."""
    try:
        # Opened here: numpy forgets to close a file that it cannot read.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise BadMedia(f"{path} is not a readable .npz file ({error}); check the file") from error
    if "images" not in held:
        there = ", ".join(held) or "nothing"
        raise BadMedia(f"{path} holds {there}; an array 'images' was wanted, and perhaps 'labels'")
    images = held["images"]
    labels = held.get("labels", np.full(len(images), -1))
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not len(images):
        raise BadMedia(
            f"{path}: images are {images.dtype} of shape {images.shape}; 8-bit integers (uint8) of "
            "(image, height, width) or (image, height, width, colour) were wanted"
        )
    if labels.shape != (len(images),) or labels.dtype.kind not in "iu":
        raise BadMedia(
            f"{path}: labels are {labels.dtype} of shape {labels.shape}; one integer for each of "
            f"the {len(images)} images was wanted"
        )
    return Pictures(images, labels)


def pixel_values(processor: Any, images: Iterable[Any], shape: tuple[int, int, int]) -> Tensor:
    """What a model takes of arrays or PIL images: (image, channel, height, width).

    Args:
        processor: the model's own, of transformers.
        images: of any sizes; the processor decides what becomes of them.
        shape: channels, height and width that the model takes.
    """
    ready = [_picture(image).convert("L" if shape[0] == 1 else "RGB") for image in images]
    try:
        pixels = processor(ready, return_tensors="pt")["pixel_values"]
    except (ValueError, TypeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadMedia(f"the processor refuses an image ({first[:160]})") from error
    if tuple(pixels.shape[1:]) != shape:
        raise BadMedia(
            f"the processor makes images of {_by(pixels.shape[1:])}, and the model takes "
            f"{_by(shape)} (channels, height, width); load the processor that belongs to it"
        )
    return torch.as_tensor(pixels)


def _picture(image: Any) -> Any:
    Image = library("PIL.Image", "bundled")
    if isinstance(image, Image.Image):
        return image
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or 0 in image.shape:
        raise BadMedia(
            f"an image is {image.dtype} of shape {image.shape}; 8-bit integers (uint8) of "
            "(height, width) or (height, width, 3) were wanted"
        )
    if image.ndim == 3 and image.shape[2] not in (3, 4):
        raise BadMedia(
            f"an image has shape {image.shape}; a last axis of 3 colours was wanted, or none"
        )
    return Image.fromarray(image)


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model takes."""
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return config.num_channels, height, width
