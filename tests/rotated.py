"""A tiny model and copies of it in another basis: the same function by other numbers.

Norms must not scale coordinates, so their gains are set to 1 first. LayerNorm also subtracts the
mean, so the rotation leaves the direction of all ones alone.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from families import build

LAYERS = 6
FAMILIES = ("llama", "qwen2", "gemma", "gpt2", "opt", "gpt_neox")
READERS = {
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "fc1",
    "query_key_value",
    "dense_h_to_4h",
    "c_attn",
    "c_fc",
    "score",
}
WRITERS = {"o_proj", "out_proj", "down_proj", "fc2", "dense", "dense_4h_to_h", "c_proj"}
TABLES = {
    "embed_tokens",
    "embed_positions",
    "embed_in",
    "embed_out",
    "lm_head",
    "wte",
    "wpe",
}


def plain(name: str, seed: int = 0, layers: int = LAYERS, **changes: object) -> PreTrainedModel:
    """A random model of a family in float64, whose norms only centre and scale."""
    depth = "n_layer" if name == "gpt2" else "num_hidden_layers"
    model = build(name, seed, **{depth: layers, **changes}).double()
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                # Gemma's gain is 1 + weight.
                module.weight.fill_(0 if "Gemma" in type(module).__name__ else 1)
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
    return model


def plain_llama(name: str = "llama", seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny Llama of three layers."""
    return plain(name, seed, layers=3, **changes)


def rotation(width: int = 24, seed: int = 0) -> Tensor:
    """A random orthogonal matrix in float64 that maps the vector of all ones to itself."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(width, width, generator=generator, dtype=torch.float64)
    start[:, 0] = 1
    basis = torch.linalg.qr(start).Q
    inner = torch.randn(width - 1, width - 1, generator=generator, dtype=torch.float64)
    turn = torch.eye(width, dtype=torch.float64)
    turn[1:, 1:] = torch.linalg.qr(inner).Q
    return basis @ turn @ basis.T


@torch.no_grad()
def rotated(model: PreTrainedModel, turn: Tensor) -> PreTrainedModel:
    """A copy whose states are those of the model times `turn`."""
    turned, done = copy.deepcopy(model), set()
    for name, module in turned.named_modules():
        leaf = name.rpartition(".")[2]
        weight = getattr(module, "weight", None)
        if leaf not in READERS | WRITERS | TABLES or id(weight) in done:
            continue
        done.add(id(weight))  # tied embeddings are one tensor
        is_transposed = type(module).__name__ == "Conv1D"
        if (leaf in WRITERS) != is_transposed:
            weight.copy_(turn.T @ weight)
        else:
            weight.copy_(weight @ turn)
        if leaf in WRITERS and module.bias is not None:
            module.bias.copy_(module.bias @ turn)
    return turned


def permuted(model: PreTrainedModel, blocks: str, order: list[int]) -> PreTrainedModel:
    """A copy whose block i (from 0) is block order[i] of the model."""
    moved = copy.deepcopy(model)
    layers = moved.get_submodule(blocks)
    assert isinstance(layers, nn.ModuleList)
    before = list(layers)
    for place, source in enumerate(order):
        layers[place] = before[source]
    return moved
