"""The untrained twin of a model: the same architecture with the weights it would start from.

In: a wrapped model and a seed. Out: a wrapped model with random weights, in eval mode.

A control: what is seen in the twin too was not learnt. In eval mode because dropout would make
every pass another model.
"""

import copy
import itertools

import torch

from layerleap.models.transformer import Transformer


def untrained(transformer: Transformer, *, seed: int = 0) -> Transformer:
    """A model of the same class and configuration, randomly initialised.

    It is of the same dtype and on the same device, with the same tokenizer and processor. Where
    the head ignores a part of what it is given (its weights are zero), the twin's does too: else
    its layers could not be read.
    """
    model = transformer.model
    config = copy.deepcopy(model.config)
    for name in ("quantization_config", "_name_or_path"):  # it is neither quantised nor saved
        if hasattr(config, name):
            delattr(config, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        twin = type(model)(config)
    twin = twin.to(device=_device(transformer), dtype=model.dtype).eval()
    with torch.no_grad():
        for before, after in itertools.pairwise(transformer.tail):
            if before.kind == "pad":
                twin.get_submodule(after.path).weight[:, transformer.d_model :] = 0
    return Transformer.wrap(
        twin,
        transformer.tokenizer,
        processor=transformer.processor,
        name=f"{transformer.identity.name}, untrained (seed {seed})",
    )


def _device(transformer: Transformer) -> torch.device:
    device = transformer.model.device
    return torch.device("cpu") if device.type == "meta" else device
