"""Recipes of the models that are trained here, on first use, from bundled ones.

In: a trained model of the catalog, and the paths of the entries it is trained from.
Out: a folder that `from_pretrained` reads, with a card that describes the training and reports
the result on held-out images or texts. Where that number made us change a recipe, its page says so.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerleap.files import whole_folder, write_json
from layerleap.quiet import quiet_transformers
from layerleap.zoo.catalog import Entry, result_words
from layerleap.zoo.convert import BICUBIC, COLOURS, write_processor
from layerleap.zoo.fine_tuned import classifier_of_reviews, tuned_on_reviews
from layerleap.zoo.images import HELD_OUT, ImageSet, pixel_values, read_npz
from layerleap.zoo.linear_head import at_size, cls_states, fit_head, with_head
from layerleap.zoo.small_bert import bert_reviews
from layerleap.zoo.small_lm import LMSettings, small_lm
from layerleap.zoo.small_vit import VitSettings, train_vit
from layerleap.zoo.training_loop import accuracy

logger = logging.getLogger(__name__)

HEAD_IMAGE_SIZE = 112  # four times that of the digits; 8 x 8 patches of 14 pixels


def train(entry: Entry, sources: Mapping[str, Path]) -> None:
    """Train the model and put it into the cache, with its card."""
    with whole_folder(entry.path) as folder, quiet_transformers():
        results = RECIPES[entry.name](sources, folder)
        note = (
            "trained by layerleap on this machine; not endorsed by the authors of the models and "
            "data it was trained from"
        )
        card = entry.card("name", "kind", "trained_from", "recipe", "licence", note=note)
        write_json(folder / "layerleap.json", {**card, **results})
    logger.info(f"{entry.name}: {result_words(results['held_out'])}")


def dinov2_mnist(sources: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Train DINOv2 with a linear head for digits and return what goes into its card."""
    from transformers import AutoImageProcessor, Dinov2Model

    digits = read_npz(sources["mnist"])
    backbone = at_size(Dinov2Model.from_pretrained(sources["dinov2"]).eval(), HEAD_IMAGE_SIZE)
    write_processor(
        folder,
        "BitImageProcessor",
        do_center_crop=False,
        resample=BICUBIC,
        **COLOURS,
        size={"height": HEAD_IMAGE_SIZE, "width": HEAD_IMAGE_SIZE},
    )
    processor = AutoImageProcessor.from_pretrained(folder)
    states: dict[str, tuple[Tensor, Tensor]] = {}
    for side in ("fitted", "held_out"):
        images = digits.side(side == "held_out")
        logger.info(f"computing the states of {len(images):,} {side.replace('_', '-')} images")
        states[side] = cls_states(backbone, processor, list(images.images)), _labels(images)
    n_classes = int(digits.labels.max()) + 1
    weight, bias = fit_head(*states["fitted"], n_classes)
    with_head(backbone, weight, bias).save_pretrained(folder)
    accuracies = {
        side: accuracy(cls.double() @ weight.T + bias, labels)
        for side, (cls, labels) in states.items()
    }
    return {**accuracies, "held_out_share": HELD_OUT, "image_size": HEAD_IMAGE_SIZE}


def vit_mnist(
    sources: Mapping[str, Path], folder: Path, settings: VitSettings | None = None
) -> dict[str, Any]:
    """Train a small ViT on digits and return what goes into its card."""
    from transformers import AutoImageProcessor

    settings = settings or VitSettings()
    digits = read_npz(sources["mnist"])
    side = digits.images.shape[1]
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    write_processor(folder, "ViTImageProcessor", size={"height": side, "width": side}, **half)
    processor = AutoImageProcessor.from_pretrained(folder)
    fitted, held_out = digits.side(False), digits.side(True)
    pixels = pixel_values(processor, fitted.images, (3, side, side))
    n_classes = int(digits.labels.max()) + 1
    logger.info(f"training on {len(fitted):,} images for {settings.epochs} epochs")
    model = train_vit(pixels, _labels(fitted), n_classes, settings)
    model.save_pretrained(folder)
    test_pixels = pixel_values(processor, held_out.images, (3, side, side))
    return {
        "fitted": accuracy(_logits(model, pixels), _labels(fitted)),
        "held_out": accuracy(_logits(model, test_pixels), _labels(held_out)),
        "held_out_share": HELD_OUT,
        "settings": asdict(settings),
    }


@torch.inference_mode()
def _logits(model: Any, pixels: Tensor) -> Tensor:
    return torch.cat([model(batch).logits for batch in pixels.split(250)])


def _labels(images: ImageSet) -> Tensor:
    return torch.tensor(images.labels, dtype=torch.long)


RECIPES: dict[str, Callable[[Mapping[str, Path], Path], dict[str, Any]]] = {
    "dinov2-mnist": dinov2_mnist,
    "vit-mnist": vit_mnist,
    "bert-reviews": bert_reviews,
    "small-lm": small_lm,
    "small-lm-2": partial(small_lm, settings=LMSettings(seed=1)),
    "small-lm-relu": partial(small_lm, settings=LMSettings(ffn="relu")),
    "small-lm-reviews": classifier_of_reviews,
    "smollm2-reviews": tuned_on_reviews,
}
