"""Whether a text, image set or recording is there: found out by its name and its first record.

In: what was given as the source of a model. Out: nothing, or an error in one line. No model, no
torch, and nothing is fetched: what is bundled counts as there. The readers call the same functions.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from layerleap.errors import BadMedia, CannotFetch, did_you_mean
from layerleap.stream.documents import iter_documents
from layerleap.stream.records import check_data_set, may_be_hub_name
from layerleap.stream.text_pairs import TITLES, iter_pairs
from layerleap.zoo.catalog import IMAGE_NAMES, SOUND_NAMES, TEXT_NAMES

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
IMAGE_SETS = (*IMAGE_NAMES, "digits")
SPEAKER = "espeak-ng"  # the program that speaks a text


def check_documents(source: str, field: str | None = "text") -> None:
    """Refuse a text that is not there, or whose first document cannot be read."""
    if source == "-" or source in TEXT_NAMES:  # standard input can be read only once
        return
    if not Path(source).expanduser().exists() and may_be_hub_name(source):
        check_data_set(source, TEXT_NAMES)
        return
    documents = iter_documents(source, field=field or "text")
    if field is not None:  # else its name is not known yet, and the file is all there is to check
        next(documents)


def check_pairs(source: str, field: str | None = "text") -> None:
    """Refuse pairs of texts that are not there, or whose first pair cannot be read."""
    if source != TITLES:
        pairs = iter_pairs(source, field=field or "text")
        if field is not None:
            next(pairs)


def check_images(source: str, field: str | None = None) -> None:
    """Refuse images that are not there; `field` is for texts."""
    path = Path(source).expanduser()
    if source in IMAGE_SETS or path.is_dir():
        return
    if not path.is_file():
        raise BadMedia(
            f"there is no file or folder {source}; image sets by name are "
            f"{', '.join(IMAGE_SETS)}{did_you_mean(source, IMAGE_SETS)}"
        )
    if path.suffix.lower() not in (*SUFFIXES, ".npz") and ".csv" not in path.suffixes[-2:]:
        raise BadMedia(
            f"{source} is not an image; expected {', '.join(SUFFIXES)}, .npz, .csv or a folder"
        )


def check_sounds(source: str, field: str | None = "text") -> None:
    """Refuse recordings that are not there, and a text to speak that is not."""
    if source == "spoken" or source.startswith("spoken:"):
        speaker()
        check_documents(source.partition(":")[2] or "news", field)
    elif source not in SOUND_NAMES and not Path(source).expanduser().exists():
        names = (*SOUND_NAMES, "spoken")
        raise BadMedia(
            f"there is no file or folder {source}; recordings by name are {', '.join(names)}"
            f"{did_you_mean(source, names)}"
        )


def speaker() -> str:
    """The program that speaks a text."""
    if (program := shutil.which(SPEAKER)) is None:
        raise CannotFetch(
            f"{SPEAKER} is not installed, so text cannot be spoken; install it (on Debian: "
            f"apt-get install {SPEAKER}) or use recordings"
        )
    return program


# By what a model reads.
CHECKS: dict[str, Callable[[str, str | None], None]] = {
    "text": check_documents,
    "pairs": check_pairs,
    "images": check_images,
    "sound": check_sounds,
}
