"""The models that are made here, on first use, from what is bundled.

In: an entry of `bundles.MADE`, and where the bundles it is made of lie.
Out: a folder that `from_pretrained` reads, with a card that says how it was made and how often it
is right on images that it was not fitted on. That number is reported, and nothing is chosen by it.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerleap.files import whole_folder, write_json
from layerleap.quiet import quiet_transformers
from layerleap.zoo.catalog import TrainedBundle
from layerleap.zoo.class_head import at_size, cls_states, fit_head, with_head
from layerleap.zoo.convert_media import BICUBIC, COLOURS, write_processor
from layerleap.zoo.pictures import HELD_OUT, Pictures, pixel_values, read_pictures
from layerleap.zoo.small_vit import VitSettings, train_vit

Tell = Callable[[str], None]
HEAD_IMAGE_SIZE = 112  # four times that of the digits; 8 x 8 patches of 14
Z95 = 1.959964


def make(made: TrainedBundle, sources: Mapping[str, Path], *, tell: Tell) -> None:
    """Put the finished model into its place in the cache."""
    with whole_folder(made.path) as folder, quiet_transformers():
        how = RECIPES[made.name](sources, folder, tell)
        card = {
            "name": made.name,
            "kind": made.kind,
            "made_of": list(made.of),
            "recipe": made.recipe,
            "licence": made.licence,
            "model": made.note,
            "note": "made by layerleap on this machine; not endorsed by the makers of its parts",
            **how,
        }
        write_json(folder / "layerleap.json", card)
    right = how["held_out"]
    tell(f"{made.name}: {right['accuracy']:.1%} of {right['images']:,} held-out images are right")


def dinov2_mnist(sources: Mapping[str, Path], folder: Path, tell: Tell) -> dict[str, Any]:
    """DINOv2 with a linear head for digits; returns what the card says about it."""
    from transformers import AutoImageProcessor, Dinov2Model

    pictures = read_pictures(sources["mnist"])
    backbone = at_size(Dinov2Model.from_pretrained(sources["dinov2"]).eval(), HEAD_IMAGE_SIZE)
    write_processor(
        folder, "BitImageProcessor", do_center_crop=False, resample=BICUBIC, **COLOURS,
        size={"height": HEAD_IMAGE_SIZE, "width": HEAD_IMAGE_SIZE},
    )  # fmt: skip
    processor = AutoImageProcessor.from_pretrained(folder)
    found: dict[bool, tuple[Tensor, Tensor]] = {}
    for held_out in (False, True):
        some = pictures.side(held_out)
        tell(f"states of {len(some):,} images to be {'tested' if held_out else 'fitted'} on")
        found[held_out] = cls_states(backbone, processor, list(some.images), tell), _labels(some)
    n_classes = int(pictures.labels.max()) + 1
    weight, bias = fit_head(*found[False], n_classes)
    with_head(backbone, weight, bias).save_pretrained(folder)
    sides = {
        name: accuracy(states.double() @ weight.T + bias, labels)
        for name, (states, labels) in (("fitted", found[False]), ("held_out", found[True]))
    }
    return {**sides, "held_out_share": HELD_OUT, "image_size": HEAD_IMAGE_SIZE}


def vit_mnist(
    sources: Mapping[str, Path], folder: Path, tell: Tell, settings: VitSettings | None = None
) -> dict[str, Any]:
    """A small ViT trained on digits; returns what the card says about it."""
    from transformers import AutoImageProcessor

    settings = settings or VitSettings()
    pictures = read_pictures(sources["mnist"])
    side = pictures.images.shape[1]
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    write_processor(folder, "ViTImageProcessor", size={"height": side, "width": side}, **half)
    processor = AutoImageProcessor.from_pretrained(folder)
    fit, held = pictures.side(False), pictures.side(True)
    pixels = pixel_values(processor, fit.images, (3, side, side))
    n_classes = int(pictures.labels.max()) + 1
    tell(f"training on {len(fit):,} images, {settings.epochs} times each")
    model = train_vit(pixels, _labels(fit), n_classes, settings, tell)
    model.save_pretrained(folder)
    others = pixel_values(processor, held.images, (3, side, side))
    return {
        "fitted": accuracy(_logits(model, pixels), _labels(fit)),
        "held_out": accuracy(_logits(model, others), _labels(held)),
        "held_out_share": HELD_OUT,
        "settings": settings.to_dict(),
    }


@torch.inference_mode()
def _logits(model: Any, pixels: Tensor) -> Tensor:
    return torch.cat([model(some).logits for some in pixels.split(250)])


def _labels(pictures: Pictures) -> Tensor:
    return torch.tensor(pictures.labels, dtype=torch.long)


def accuracy(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """The share of images whose class has the highest logit, with Wilson's 95 % interval."""
    n, right = len(labels), int((logits.argmax(-1) == labels).sum())
    p, z2 = right / n, Z95**2
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    reach = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return {"images": n, "accuracy": p, "low": middle - reach, "high": middle + reach}


RECIPES: dict[str, Callable[[Mapping[str, Path], Path, Tell], dict[str, Any]]] = {
    "dinov2-mnist": dinov2_mnist,
    "vit-mnist": vit_mnist,
}
