"""Tiny models, demonstrations and an independent reference for the laws of learning."""

import copy

import torch
from torch import nn

from edit_cases import wrapped
from layerleap.act.learning.gradients import gradients
from layerleap.act.learning.lessons import Demonstration, Lesson, lesson
from layerleap.act.learning.parameters import Chosen, choose
from layerleap.models.transformer import Transformer

# Absolute positions and a fused matrix; grouped heads; a fused matrix head by head and parallel
# parts; norms after parts and a cap; normed keys and grouped heads; biases; parallel parts.
FAMILIES = ["gpt2", "llama", "gpt_neox", "gemma2", "qwen3", "qwen2", "phi", "cohere"]


def ids(n: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(5, 61, (n,), generator=generator).tolist())


def demonstrations(n: int = 3, length: int = 7) -> list[Demonstration]:
    return [Demonstration(ids(length + seed % 2, seed), 2) for seed in range(n)]


def values(model: Transformer, chosen: Chosen) -> dict:
    return {n: p.detach().clone() for n, p in model.model.named_parameters() if n in chosen.masks}


def found(model: Transformer, how: str, parameters="keys-values", tokens="all", **options):
    """The gradients of a batch of two demonstrations of different lengths."""
    chosen = choose(model, parameters)
    batch = lesson(model, demonstrations(2), tokens)
    return gradients(model, chosen, values(model, chosen), batch, how=how, **options)


def reference(model: Transformer, batch: Lesson, chosen: Chosen, *, causal: bool) -> dict:
    """Gradients by one plain backward pass of torch, on a copy of the model with its own hooks."""
    copied = Transformer.wrap(copy.deepcopy(model.model), check=False)
    states: list = []

    def detach(module, args, kwargs):
        if args:
            return (args[0].detach(), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].detach()}

    def collect(module, args, output):
        states.append(output if isinstance(output, torch.Tensor) else output[0])

    handles = []
    for block in copied.block_modules():
        if causal:
            handles.append(block.register_forward_pre_hook(detach, with_kwargs=True))
        handles.append(block.register_forward_hook(collect))
    copied.model(**batch.inputs, use_cache=False)
    for handle in handles:
        handle.remove()
    loss = sum(
        (
            nn.functional.cross_entropy(
                copied.logits(h[batch.keep]), batch.targets, reduction="none"
            )
            * batch.weights
        ).sum()
        for h in (states if causal else states[-1:])
    )
    loss.backward()
    own = dict(copied.model.named_parameters())
    nothing = {name: torch.zeros_like(own[name]) for name in chosen.names}
    return {
        name: chosen.masked(name, nothing[name] if own[name].grad is None else own[name].grad)
        for name in chosen.names
    }


def perturbed(name: str, block: int, path: str) -> Transformer:
    """A copy of the model with noise in one matrix of one block."""
    model = copy.deepcopy(wrapped(name).model)
    weight = model.get_parameter(path)
    with torch.no_grad():
        weight.add_(torch.randn_like(weight) * 0.1)
    return Transformer.wrap(model, check=False)
