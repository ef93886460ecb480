"""What the recipes of trained models share: the training loop, batches of texts, and accuracy.

In: a model and the loss of each batch, computed when it is asked for. Out: the model, trained.
"""

import logging
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.extras import library

logger = logging.getLogger(__name__)

SORTED_BATCHES = 50  # batches whose texts are sorted by length together: little padding


def optimize(
    model: Any,
    losses: Iterable[Tensor],
    settings: Any,
    steps: int,
    warmup: int,
    betas: tuple[float, float] = (0.9, 0.999),
) -> None:
    """Train `model` for `steps` steps of AdamW, one for each loss, and leave it in eval mode.

    Each loss is computed after the step before it. `settings` has the peak `rate`, which is
    reached after `warmup` steps, and the weight `decay`.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, lr=settings.rate, weight_decay=settings.decay, betas=betas
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, warmup, steps)
    )
    model.train()
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """The learning rate as a fraction of its peak."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def encode(tokenizer: Any, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of each text, truncated."""
    encoded = tokenizer(list(texts), truncation=True, max_length=max_tokens)
    return list(encoded["input_ids"])


def shuffled_batches(
    encoded: Sequence[Sequence[int]], size: int, order: random.Random
) -> Iterator[list[int]]:
    """Row numbers of random batches; texts of similar length go together."""
    rows = list(range(len(encoded)))
    order.shuffle(rows)
    batches = []
    for start in range(0, len(rows), size * SORTED_BATCHES):
        window = rows[start : start + size * SORTED_BATCHES]
        window.sort(key=lambda row: len(encoded[row]))
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


def class_losses(
    model: Any, encoded: list[list[int]], labels: Sequence[int], settings: Any
) -> Iterator[Tensor]:
    """The loss of one batch of texts after the other, by their classes; epochs are logged."""
    for epoch in range(settings.epochs):
        loss, order = torch.zeros(()), random.Random(settings.seed + epoch)
        for rows in shuffled_batches(encoded, settings.batch, order):
            inputs = collate([encoded[row] for row in rows], model.config.pad_token_id)
            targets = torch.tensor([labels[row] for row in rows])
            loss = nn.functional.cross_entropy(model(**inputs).logits, targets)
            yield loss
        logger.info(f"epoch {epoch + 1} of {settings.epochs}, last loss {loss.item():.3f}")


@torch.inference_mode()
def class_accuracy(model: Any, encoded: list[list[int]], labels: Sequence[int]) -> dict[str, Any]:
    """The accuracy of a classifier on texts."""
    order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
    logits = torch.empty(len(encoded), model.config.num_labels)
    for start in range(0, len(order), 256):
        rows = order[start : start + 256]
        inputs = collate([encoded[row] for row in rows], model.config.pad_token_id)
        logits[rows] = model(**inputs).logits
    return accuracy(logits, torch.tensor(labels), "texts")


def accuracy(logits: Tensor, labels: Tensor, noun: str = "images") -> dict[str, Any]:
    """The share of images or texts classified correctly, with Wilson's 95 % interval."""
    binomtest = library("scipy.stats", "bundled", "intervals need it").binomtest
    n, correct = len(labels), int((logits.argmax(-1) == labels).sum())
    low, high = map(float, binomtest(correct, n).proportion_ci(method="wilson"))
    return {noun: n, "accuracy": correct / n, "low": low, "high": high}
