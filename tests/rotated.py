"""A model and the same model in another basis of its residual stream."""

import copy

import torch
from families import build
from torch import Tensor
from transformers import PreTrainedModel

READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head", "score")
WRITERS = ("o_proj", "down_proj")


def plain_llama(name: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny Llama in float64 whose norms have no gain: then any rotation is the same model."""
    model = build(name, seed, **changes).double()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path:
                parameter.fill_(1.0)
    return model


def rotation(width: int, seed: int = 5) -> Tensor:
    """A random orthogonal matrix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator)).Q


@torch.no_grad()
def rotated(model: PreTrainedModel, turn: Tensor) -> PreTrainedModel:
    """The same model with every state h as h @ turn."""
    other = copy.deepcopy(model)
    embedding = other.get_input_embeddings().weight
    embedding.copy_(embedding @ turn)
    for path, module in other.named_modules():
        name = path.rpartition(".")[2]
        if name in READERS and module.weight is not embedding:
            module.weight.copy_(module.weight @ turn)
        elif name in WRITERS:
            module.weight.copy_(turn.T @ module.weight)
    return other
