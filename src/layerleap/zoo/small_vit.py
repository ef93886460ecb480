"""A small ViT, trained end to end on a few thousand images.

In: pixels, classes and settings. Out: the trained model in eval mode.

The same settings, machine and number of threads give the same weights. Every image is shifted by
up to two pixels each time. Held-out images are not used, not even for early stopping.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.zoo.training_loop import optimize

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VitSettings:
    """Model shape and training; plain values, written into the model card."""

    layers: int = 8
    d_model: int = 64
    heads: int = 4
    patch: int = 7
    epochs: int = 40
    batch: int = 64
    rate: float = 1e-3  # peak learning rate; warmed up for one epoch, then a cosine decay
    decay: float = 0.05  # weight decay
    shift: int = 2  # pixels
    seed: int = 0


def train_vit(pixels: Tensor, labels: Tensor, n_classes: int, settings: VitSettings) -> Any:
    """A ViT for images of this size, trained from scratch on (image, channel, height, width)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = _new(pixels, n_classes, settings)
        per_epoch = math.ceil(len(pixels) / settings.batch)
        losses = _losses(model, pixels, labels, settings)
        optimize(model, losses, settings, settings.epochs * per_epoch, warmup=per_epoch)
    return model


def _losses(model: Any, pixels: Tensor, labels: Tensor, settings: VitSettings) -> Iterator[Tensor]:
    for epoch in range(settings.epochs):
        loss = torch.zeros(())
        for chosen in torch.randperm(len(pixels)).split(settings.batch):
            logits = model(_shifted(pixels[chosen], settings.shift)).logits
            loss = nn.functional.cross_entropy(logits, labels[chosen])
            yield loss
        if (epoch + 1) % 10 == 0:
            logger.info(f"epoch {epoch + 1} of {settings.epochs}, last loss {loss.item():.3f}")


def _new(pixels: Tensor, n_classes: int, settings: VitSettings) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    names = {number: str(number) for number in range(n_classes)}
    config = ViTConfig(
        hidden_size=settings.d_model,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=2 * settings.d_model,
        image_size=pixels.shape[-1],
        patch_size=settings.patch,
        num_channels=pixels.shape[1],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )
    return ViTForImageClassification(config)


def _shifted(pixels: Tensor, limit: int) -> Tensor:
    """Each image shifted at random by at most `limit` pixels; the border gets the darkest value."""
    if not limit:
        return pixels
    n, _, height, width = pixels.shape
    padded = nn.functional.pad(pixels, (limit,) * 4, value=pixels.min().item())
    down, right = torch.randint(0, 2 * limit + 1, (2, n, 1))
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    return torch.stack(
        [image[:, r][:, :, c] for image, r, c in zip(padded, rows, columns, strict=True)]
    )
