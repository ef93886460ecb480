"""Tiny random models with a tokenizer, for tests that need text."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models as token_models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from families import build
from layerleap.models.transformer import Transformer

WORDS = tuple(
    word
    for line in (
        "the a cat dog sat ran on under mat tree river and then it was big small red blue house",
        "man woman saw heard old new day night sun moon star fish bird sang slept ate drank went",
        "came",
    )
    for word in line.split()
)


def tokenizer(kind: str = "next-token", *, side: str = "right") -> PreTrainedTokenizerFast:
    """A word-level tokenizer of a few dozen words, ids below 61."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    backend = Tokenizer(token_models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "masked-token":
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<bos>",
        sep_token="<eos>",
        padding_side=side,
    )


def tiny(name: str = "llama", *, seed: int = 0, side: str = "right", **changes: Any) -> Transformer:
    """A wrapped random model of family `name` that reads `WORDS`."""
    model = build(name, seed, **changes)
    kind = "masked-token" if "Masked" in type(model).__name__ else "next-token"
    return Transformer.wrap(model, tokenizer(kind, side=side), name=f"tiny-{name}")


def spelling() -> Transformer:
    """A wrapped random model that reads and writes letters, each one token."""
    letters = [*"<>\u0120abcdefghijklmnopqrstuvwxyz_"]
    backend = Tokenizer(token_models.BPE({one: number for number, one in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    own = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<", eos_token=">")
    model = build("llama", 0, vocab_size=len(letters))
    model.generation_config.eos_token_id = None
    return Transformer.wrap(model, own, name="spelling")


def sentences(n: int, seed: int = 0) -> list[str]:
    """n random documents of a few sentences."""
    import random

    rng = random.Random(seed)
    return [
        " ".join(
            " ".join(rng.choices(WORDS, k=rng.randint(4, 12))).capitalize() + " ." for _ in range(3)
        )
        for _ in range(n)
    ]


def text_file(folder: Path, n: int = 160) -> Path:
    """Records of a few sentences each."""
    path = folder / "text.jsonl"
    lines = [json.dumps({"text": text}) for text in sentences(n)]
    path.write_text("\n".join(lines), encoding="utf8")
    return path
