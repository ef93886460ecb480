"""Copies of language models fine-tuned on film reviews.

In: a model's folder, the reviews, and settings. Out: the fine-tuned model and its card.

    small-lm-reviews    the small language model as a classifier of reviews, with a head that reads
                        the last token; all weights are trained, because its embeddings say little
                        about opinions
    smollm2-reviews     the bundled language model, trained on the reviews as a language model; only
                        its last blocks change, so that differences are easy to find
"""

import json
import logging
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.zoo.reviews import HELD_OUT, SHORT, is_held_out
from layerleap.zoo.small_bert import CLASSES
from layerleap.zoo.small_lm import lm_loss, token_stream
from layerleap.zoo.training_loop import (
    class_accuracy,
    class_losses,
    collate,
    encode,
    optimize,
    shuffled_batches,
)

logger = logging.getLogger(__name__)

TELL_STEPS = 20  # steps between two messages


@dataclass(frozen=True)
class TunedSettings:
    """What is trained and how long; plain values, written into the model card."""

    blocks: int = 6  # how many of the last blocks are trained
    ends: bool = True  # whether embeddings and final norm are trained, too
    texts: int = 16_000  # reviews to train on, at most
    tested: int = 2000  # reviews of each side that the card's results are measured on, at most
    # Characters; longer reviews are left out. They often begin with the plot.
    review_length: int | None = SHORT
    max_tokens: int = 64  # longer reviews are truncated
    epochs: int = 4
    batch: int = 32
    rate: float = 1e-3  # peak learning rate; warmed up, then a cosine decay
    decay: float = 0.01
    seed: int = 0


LM = TunedSettings(
    blocks=3,
    ends=False,
    review_length=None,
    texts=160,
    tested=40,
    epochs=1,
    batch=4,
    max_tokens=64,
    rate=1e-4,
)
Sides = dict[str, tuple[list[str], list[int]]]


def review_sides(path: Path, settings: TunedSettings) -> Sides:
    """Reviews and verdicts by side, drawn at random and at most as many as the settings say."""
    with path.open(encoding="utf8") as lines:
        records = [json.loads(line) for line in lines]
    if settings.review_length is not None:
        records = [record for record in records if len(record["text"]) <= settings.review_length]
    random.Random(settings.seed).shuffle(records)  # the file has one source after the other
    sides: Sides = {}
    for side, limit in (("fitted", settings.texts), ("held_out", settings.tested)):
        is_tested = side == "held_out"
        rows = [record for record in records if is_held_out(record["text"]) == is_tested][:limit]
        sides[side] = [row["text"] for row in rows], [int(row["label"]) for row in rows]
    return sides


def classifier_of_reviews(
    sources: Mapping[str, Path], folder: Path, settings: TunedSettings | None = None
) -> dict[str, Any]:
    """Fine-tune the small language model as a classifier and return what goes into its card."""
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    settings = settings or TunedSettings()
    tokenizer = AutoTokenizer.from_pretrained(sources["small-lm"])
    sides = review_sides(sources["reviews"], settings)
    texts, labels = sides["fitted"]
    encoded = {side: encode(tokenizer, t, settings.max_tokens) for side, (t, _) in sides.items()}
    logger.info(f"training on {len(texts):,} reviews")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        names = dict(enumerate(CLASSES))
        model = LlamaForSequenceClassification.from_pretrained(
            sources["small-lm"], id2label=names, label2id={v: k for k, v in names.items()}
        )
        ends = [model.get_input_embeddings(), model.model.norm] if settings.ends else []
        _freeze(model, settings.blocks, model.score, *ends)
        losses = class_losses(model, encoded["fitted"], labels, settings)
        _train(model, losses, settings, len(texts))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    limit = settings.tested
    return {
        **{
            side: class_accuracy(model, encoded[side][:limit], truth[:limit])
            for side, (_, truth) in sides.items()
        },
        "held_out_share": HELD_OUT,
        "settings": asdict(settings),
    }


def tuned_on_reviews(
    sources: Mapping[str, Path], folder: Path, settings: TunedSettings = LM
) -> dict[str, Any]:
    """Train the last blocks of the bundled language model on reviews; returns its card."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sources["smollm2"])
    model = AutoModelForCausalLM.from_pretrained(sources["smollm2"]).eval()
    sides = {k: texts for k, (texts, _) in review_sides(sources["reviews"], settings).items()}
    encoded = encode(tokenizer, sides["fitted"], settings.max_tokens)
    tested = token_stream(tokenizer, [text[:1000] for text in sides["held_out"]])
    before = lm_loss(model, tested, settings.max_tokens)["loss"]
    logger.info(f"training the last {settings.blocks} blocks on {len(encoded):,} reviews")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        _freeze(model, settings.blocks)
        losses = _text_losses(model, encoded, tokenizer.eos_token_id, settings)
        _train(model, losses, settings, len(encoded))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    after = lm_loss(model, tested, settings.max_tokens)
    return {
        "held_out": {**after, "loss_before": before},
        "held_out_share": HELD_OUT,
        "settings": asdict(settings),
    }


def _freeze(model: Any, blocks: int, *also: nn.Module) -> None:
    """Leave only the last blocks, and what else is named, to be trained."""
    model.requires_grad_(False)
    for module in (*model.model.layers[-blocks:], *also):
        module.requires_grad_(True)


def _text_losses(
    model: Any, encoded: list[list[int]], pad: int, settings: TunedSettings
) -> Iterator[Tensor]:
    """The loss of one batch of reviews after the other, by their next tokens."""
    for epoch in range(settings.epochs):
        order = random.Random(settings.seed + epoch)
        for rows in shuffled_batches(encoded, settings.batch, order):
            inputs = collate([encoded[row] for row in rows], pad)
            logits = model(**inputs, use_cache=False).logits[:, :-1]
            real = inputs["attention_mask"][:, 1:].bool()
            yield nn.functional.cross_entropy(logits[real], inputs["input_ids"][:, 1:][real])


def _train(model: Any, losses: Iterable[Tensor], settings: TunedSettings, n_texts: int) -> None:
    steps = settings.epochs * math.ceil(n_texts / settings.batch)

    def with_messages() -> Iterator[Tensor]:
        for step, loss in enumerate(losses, start=1):
            yield loss
            if step % TELL_STEPS == 0:
                logger.info(f"step {step:,} of {steps:,}, loss {loss.item():.3f}")

    optimize(model, with_messages(), settings, steps, max(1, steps // 10))
