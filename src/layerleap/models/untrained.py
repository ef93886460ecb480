"""An untrained control model: the same architecture with freshly initialised weights.

In: a wrapped model and a seed. Out: a wrapped model with random weights, in eval mode: all of them,
or only those inside blocks.

An effect that the untrained model shows too was not learned. It is in eval mode because dropout
would make every pass different.
"""

import copy
import itertools

import torch
from transformers import PreTrainedModel

from layerleap.arguments import checked
from layerleap.models.discovery.probe import entry_device
from layerleap.models.discovery.sites import is_norm
from layerleap.models.transformer import Transformer


@checked
def untrained(transformer: Transformer, *, seed: int = 0) -> Transformer:
    """A randomly initialised model of the same class and configuration.

    It has the same dtype, device, tokenizer and processor. If the original's head ignores part of
    its input (its weights there are zero), so does the new one's, because its layers could not be
    read otherwise.
    """
    control = _fresh(transformer, seed)
    return _wrapped(transformer, control, f"untrained (seed {seed})")


@checked
def untrained_blocks(transformer: Transformer, *, seed: int = 0) -> Transformer:
    """A control whose blocks are untrained: embeddings, all norms and head are the original's.

    It shows what a measure owes to the embeddings, the architecture and the head alone.
    """
    control = _fresh(transformer, seed)
    norms = tuple(
        f"{path}." for path, module in transformer.model.named_modules() if is_norm(module)
    )
    blocks = tuple(f"{path}." for path in transformer.blocks)
    parameters = dict(control.named_parameters())
    with torch.no_grad():
        for name, weight in transformer.model.named_parameters():
            if not name.startswith(blocks) or name.startswith(norms):
                parameters[name].copy_(weight)
    return _wrapped(transformer, control, f"untrained blocks (seed {seed})")


def _fresh(transformer: Transformer, seed: int) -> PreTrainedModel:
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
    return control


def _wrapped(transformer: Transformer, control: PreTrainedModel, what: str) -> Transformer:
    return Transformer.wrap(
        control,
        transformer.tokenizer,
        processor=transformer.processor,
        name=f"{transformer.identity.name}, {what}",
    )
