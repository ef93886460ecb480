"""A small BERT that tells good film reviews from bad ones, trained from scratch.

In: texts, their classes, and settings. Out: a tokenizer, and the trained model in eval mode.

The same settings, machine and number of threads give the same weights. Held-out texts are used
neither for the vocabulary nor for early stopping.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.zoo.small_vit import warmup_cosine

CLASSES = ("negative", "positive")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SORTED_BATCHES = 50  # batches whose texts are sorted by length together: little padding


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


def train_tokenizer(texts: Sequence[str], settings: BertSettings) -> Any:
    """A lower-case WordPiece tokenizer with a vocabulary of these texts."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import PreTrainedTokenizerFast

    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(
        texts, vocab_size=settings.vocabulary, special_tokens=list(SPECIAL), show_progress=False
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    backend = pieces._tokenizer
    from tokenizers.processors import BertProcessing

    ids = {token: backend.token_to_id(token) for token in ("[SEP]", "[CLS]")}
    backend.post_processor = BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=settings.max_tokens,
        **dict(zip(names, SPECIAL, strict=True)),
    )


def train_bert(
    texts: Sequence[str],
    labels: Sequence[int],
    tokenizer: Any,
    settings: BertSettings,
    tell: Callable[[str], None],
) -> Any:
    """A `BertForSequenceClassification` trained on these texts."""
    encoded = encode(tokenizer, texts, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = _new(tokenizer, settings).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.rate, weight_decay=settings.decay
        )
        steps = settings.epochs * math.ceil(len(texts) / settings.batch)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, steps // 10, steps)
        )
        for epoch in range(settings.epochs):
            loss, order = torch.zeros(()), random.Random(settings.seed + epoch)
            for rows in shuffled_batches(encoded, settings.batch, order):
                inputs = collate([encoded[row] for row in rows], tokenizer.pad_token_id)
                targets = torch.tensor([labels[row] for row in rows])
                loss = nn.functional.cross_entropy(model(**inputs).logits, targets)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            tell(f"epoch {epoch + 1} of {settings.epochs}, last loss {loss.item():.3f}")
    return model.eval()


@torch.inference_mode()
def classify(model: Any, tokenizer: Any, texts: Sequence[str], settings: BertSettings) -> Tensor:
    """Logits of each text: (text, class)."""
    encoded = encode(tokenizer, texts, settings)
    order = sorted(range(len(texts)), key=lambda row: len(encoded[row]))
    logits = torch.empty(len(texts), len(CLASSES))
    for start in range(0, len(order), 256):
        rows = order[start : start + 256]
        inputs = collate([encoded[row] for row in rows], tokenizer.pad_token_id)
        logits[rows] = model(**inputs).logits
    return logits


def encode(tokenizer: Any, texts: Sequence[str], settings: BertSettings) -> list[list[int]]:
    """Token ids of each text, truncated."""
    ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=settings.max_tokens)[
        "input_ids"
    ]
    return ids


def shuffled_batches(
    encoded: Sequence[Sequence[int]], size: int, order: random.Random
) -> Iterator[list[int]]:
    """Row numbers of random batches; texts of similar length go together."""
    rows = list(range(len(encoded)))
    order.shuffle(rows)
    batches = []
    for start in range(0, len(rows), size * SORTED_BATCHES):
        window = sorted(
            rows[start : start + size * SORTED_BATCHES], key=lambda row: len(encoded[row])
        )
        batches += [window[at : at + size] for at in range(0, len(window), size)]
    order.shuffle(batches)
    yield from batches


def collate(texts: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    """Padded ids and their mask."""
    ids = nn.utils.rnn.pad_sequence(
        [torch.tensor(text) for text in texts], batch_first=True, padding_value=pad
    )
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


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
