"""Tiny models for tests of the concept index, whose tokens are chosen texts."""

from pathlib import Path
from typing import Any

from families import build
from layerleap.lens.vocabulary.build import index as build_index
from layerleap.lens.vocabulary.index import ConceptIndex
from layerleap.models.transformer import Transformer
from tiny_models import sentences, tiny

# Words with and without a space, in several cases, with accents, signs and inside other signs.
TEXTS = (
    "<pad>",
    "<bos>",
    "a",
    " guitar",
    "guitar",
    " Guitar",
    " guitars",
    ".guitar",
    " music",
    " Music",
    " band",
    " bandit",
    " caf\u00e9",
    " cafe",
    "->",
    " ->",
    "\u5409\u4ed6",
    " \u00fcber",
    "elect",
    " electro",
    "\n",
    " ",
    "don",
    "'t",
    " don",
    "_x",
    "0",
    " 10",
    "<b>",
    " the",
)


class Texts:
    """A tokenizer whose token i adds TEXTS[i]; the rest are unused."""

    all_special_ids = (0, 1)
    unk_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [TEXTS.index(text)]}

    def decode(self, ids: Any) -> str:
        return "".join(TEXTS[i] if i < len(TEXTS) else "" for i in ids)

    def convert_ids_to_tokens(self, index: int) -> str:
        return TEXTS[index] if index < len(TEXTS) else ""


def worded(name: str = "llama", seed: int = 0, **changes: Any) -> Transformer:
    """A tiny random model with these tokens."""
    return Transformer.wrap(build(name, seed, **changes), Texts(), name=f"worded-{name}")  # type: ignore[arg-type]


def indexed(path: Path, name: str = "llama", *, top: int = 8, **how: Any) -> ConceptIndex:
    """An index of a tiny random model that reads `WORDS`."""
    how = {"text": sentences(12), "clusters": 5, "progress": False, **how}
    return build_index(tiny(name), path, top=top, **how)
