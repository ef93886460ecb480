"""A small BERT that tells good film reviews from bad ones, trained from scratch.

In: reviews and settings. Out: a tokenizer and the trained model, and what goes into its card.

The same settings, machine and number of threads give the same weights. Held-out texts are used
neither for the vocabulary nor for early stopping.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from layerleap.zoo.reviews import HELD_OUT, is_held_out
from layerleap.zoo.training_loop import class_accuracy, class_losses, encode, optimize

logger = logging.getLogger(__name__)

CLASSES = ("negative", "positive")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class BertSettings:
    """Model shape and training; plain values, written into the model card."""

    layers: int = 6
    d_model: int = 64
    heads: int = 4
    vocabulary: int = 6000
    max_tokens: int = 64  # length of the position table; longer texts are truncated
    epochs: int = 2
    batch: int = 64
    rate: float = 5e-4  # peak learning rate; warmed up, then a cosine decay
    decay: float = 0.05  # weight decay
    dropout: float = 0.1
    seed: int = 0


def bert_reviews(
    sources: Mapping[str, Path], folder: Path, settings: BertSettings | None = None
) -> dict[str, Any]:
    """Train a small BERT on the reviews and return what goes into its card."""
    settings = settings or BertSettings()
    with sources["reviews"].open(encoding="utf8") as lines:
        records = [json.loads(line) for line in lines]
    sides: dict[str, tuple[list[str], list[int]]] = {"fitted": ([], []), "held_out": ([], [])}
    for record in records:
        texts, labels = sides["held_out" if is_held_out(record["text"]) else "fitted"]
        texts.append(record["text"])
        labels.append(record["label"])
    texts, labels = sides["fitted"]
    logger.info(f"training on {len(texts):,} reviews for {settings.epochs} epochs")
    tokenizer = train_tokenizer(texts, settings)
    encoded = {side: encode(tokenizer, t, settings.max_tokens) for side, (t, _) in sides.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = _new(tokenizer, settings)
        losses = class_losses(model, encoded["fitted"], labels, settings)
        steps = settings.epochs * math.ceil(len(texts) / settings.batch)
        optimize(model, losses, settings, steps, warmup=steps // 10)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return {
        **{side: class_accuracy(model, encoded[side], sides[side][1]) for side in sides},
        "held_out_share": HELD_OUT,
        "settings": asdict(settings),
    }


def train_tokenizer(texts: Sequence[str], settings: BertSettings) -> Any:
    """A lower-case WordPiece tokenizer with a vocabulary of these texts."""
    from tokenizers import BertWordPieceTokenizer
    from tokenizers.processors import BertProcessing
    from transformers import PreTrainedTokenizerFast

    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(
        texts, vocab_size=settings.vocabulary, special_tokens=list(SPECIAL), show_progress=False
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    backend = pieces._tokenizer
    ids = {token: backend.token_to_id(token) for token in ("[SEP]", "[CLS]")}
    backend.post_processor = BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=settings.max_tokens,
        **dict(zip(names, SPECIAL, strict=True)),
    )


def _new(tokenizer: Any, settings: BertSettings) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.d_model,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=2 * settings.d_model,
        max_position_embeddings=settings.max_tokens,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: number for number, name in enumerate(CLASSES)},
    )
    return BertForSequenceClassification(config)
