"""A linear classification head on the CLS state of a frozen backbone.

In: a DINOv2 backbone, its processor, images, and the class of each.
Out: the backbone with that head: an image classifier that a lens can read.

The head is a multinomial logistic regression on standardised states with an L2 penalty of 1
(scikit-learn's default). The problem is convex, so the result is unique and needs no seed.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.zoo.images import image_shape, pixel_values

logger = logging.getLogger(__name__)

BATCH = 50
PENALTY = 1.0
STEPS = 500


@torch.inference_mode()
def cls_states(backbone: Any, processor: Any, images: Sequence[Any]) -> Tensor:
    """The CLS state of each image after the final norm: (image, d_model)."""
    states, shape = [], image_shape(backbone.config)
    for start in range(0, len(images), BATCH):
        if start and start % 1000 == 0:
            logger.info(f"computed the states of {start:,} of {len(images):,} images")
        # A batch at a time: the pixels of thousands of images fill a gigabyte.
        pixels = pixel_values(processor, images[start : start + BATCH], shape)
        states.append(backbone(pixels).last_hidden_state[:, 0].clone())
    return torch.cat(states)


def fit_head(states: Tensor, labels: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """Weight (class, d_model) and bias (class,) of the regression, for unstandardised states."""
    x = states.double()
    mean, spread = x.mean(0), x.std(0, correction=0).clamp_min(1e-12)
    x = (x - mean) / spread
    weight = torch.zeros(n_classes, x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(n_classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=STEPS,
        max_eval=2 * STEPS,
        history_size=20,
        tolerance_grad=1e-6,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(x @ weight.T + bias, labels, reduction="sum")
        value = value + PENALTY * weight.square().sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    raw = weight.detach() / spread  # folds the standardisation into the head
    return raw, bias.detach() - raw @ mean


@torch.no_grad()
def at_size(backbone: Any, image_size: int) -> Any:
    """The same backbone for smaller images, with its position table interpolated once.

    The model could interpolate in every pass, but then its configuration would state another
    image size.
    """
    config = type(backbone.config).from_dict(
        {**backbone.config.to_dict(), "image_size": image_size}
    )
    smaller = type(backbone)(config).eval()
    n_positions = smaller.embeddings.position_embeddings.shape[1]
    like = torch.zeros(1, n_positions, config.hidden_size)
    table = backbone.embeddings.interpolate_pos_encoding(like, image_size, image_size)
    weights = {**backbone.state_dict(), "embeddings.position_embeddings": table}
    smaller.load_state_dict(weights)
    return smaller


@torch.no_grad()
def with_head(backbone: Any, weight: Tensor, bias: Tensor) -> Any:
    """An image classifier made of the backbone and the head.

    Its class has a head on the CLS state and the mean over patches. The weights for the mean are
    zero, so the logits depend on the CLS state alone and can be read at every layer.
    """
    from transformers import Dinov2ForImageClassification

    names = {number: str(number) for number in range(len(bias))}
    config = type(backbone.config).from_dict(
        {
            **backbone.config.to_dict(),
            "id2label": names,
            "label2id": {v: k for k, v in names.items()},
        }
    )
    model = Dinov2ForImageClassification(config).eval()
    model.dinov2.load_state_dict(backbone.state_dict())
    model.classifier.weight.zero_()
    model.classifier.weight[:, : config.hidden_size] = weight.float()
    model.classifier.bias.copy_(bias.float())
    return model
