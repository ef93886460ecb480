"""An untrained control model: the same architecture with freshly initialised weights.

In: a wrapped model and a seed. Out: a wrapped model with random weights, in eval mode.

An effect that the untrained model shows too was not learned. It is in eval mode because dropout
would make every pass different.
"""

import copy
import itertools

import torch

from layerleap.arguments import checked
from layerleap.models.discovery.probe import entry_device
from layerleap.models.transformer import Transformer


@checked
def untrained(transformer: Transformer, *, seed: int = 0) -> Transformer:
    """A randomly initialised model of the same class and configuration.

    It has the same dtype, device, tokenizer and processor. If the original's head ignores part of
    its input (its weights there are zero), so does the new one's, because its layers could not be
    read otherwise.
    """
    model = transformer.model
    config = copy.deepcopy(model.config)
    for name in ("quantization_config", "_name_or_path"):  # the new one has neither
        if hasattr(config, name):
            delattr(config, name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        control = type(model)(config)
    control = control.to(device=entry_device(model), dtype=model.dtype).eval()
    with torch.no_grad():
        for before, after in itertools.pairwise(transformer.tail):
            if before.kind == "pad":
                control.get_submodule(after.path).weight[:, transformer.d_model :] = 0
    return Transformer.wrap(
        control,
        transformer.tokenizer,
        processor=transformer.processor,
        name=f"{transformer.identity.name}, untrained (seed {seed})",
    )
