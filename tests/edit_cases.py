"""Tiny models, recorded passes and edits for the laws of editing."""

from functools import cache

import torch
from torch import Tensor, nn

from families import build
from layerleap.act.edits import PatchState, ReplaceParts
from layerleap.act.edits.replace import PartMaps, cascades
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.linear import LinearMap
from layerleap.models.discovery.parts import KINDS, block_parts
from layerleap.models.discovery.probe import prepare, probe
from layerleap.models.hooks.recording import Recording, record
from layerleap.models.transformer import Transformer

EXPERTS = {"gpt_oss", "mixtral", "qwen2_moe"}  # no neurons to edit; rows meet in one product
# Attention that does not go through transformers' interface.
OWN_ATTENTION = {"gptj", "gpt_neo", "bloom", "falcon", "falcon_new", "falcon_alibi", "mpt"}


def cascade(maps: PartMaps, recording: Recording, keep: Tensor, kinds, start: int) -> Tensor:
    """The rows that a recorded text ends with, when parts are replaced from one layer on."""
    (end,) = cascades(maps, recording, keep, kinds, [start])
    return end


@cache
def wrapped(name: str, **changes) -> Transformer:
    model = build(name, **changes)
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels do not know float64
    return Transformer.wrap(model.double(), check=False)


@cache
def inputs(name: str) -> dict:
    """Three texts, one of them padded on the right where the family knows padding."""
    model = wrapped(name).model
    arguments = probe(model, rows=3, seed=4)
    if "attention_mask" in arguments:
        arguments["attention_mask"][2, 5:] = 0
    return prepare(model, arguments)


@cache
def recording(name: str) -> Recording:
    return record(wrapped(name), inputs(name), logits=True)


@cache
def part_bank(name: str) -> ShortcutBank:
    """Random maps: the laws hold for any."""
    transformer = wrapped(name)
    return random_parts(transformer)


def random_parts(transformer: Transformer, kinds=KINDS) -> ShortcutBank:
    d, generator = transformer.d_model, torch.Generator().manual_seed(8)
    maps = {
        (block, part): LinearMap(
            block - 1, block, weight=torch.randn(d, d, generator=generator) / d**0.5
        )
        for block, part in block_parts(transformer, kinds)
    }
    return ShortcutBank(
        [],
        model=transformer.identity.to_dict(),
        n_layers=transformer.n_layers,
        d_model=d,
        parts=maps,
    )


def traces(model: nn.Module) -> list:
    """Everything that hooks, edits and swapped forwards leave on a model."""
    return [
        (
            list(m._forward_hooks),
            list(m._forward_pre_hooks),
            m.__dict__.get("forward"),
            m.__dict__.get("generate"),
        )
        for m in model.modules()
    ]


@torch.no_grad()
def logits(name: str) -> Tensor:
    return wrapped(name).model(**inputs(name)).logits


def foreign(name: str, layer: int, *, text: int = 1, position: int = 0) -> PatchState:
    """The state of another text at the same layer, and noise: all images start alike."""
    generator = torch.Generator().manual_seed(layer)
    states = recording(name).states[layer][0, :1]
    states = states + torch.randn(states.shape, generator=generator, dtype=states.dtype)
    return PatchState(layer, states, [position], [text])


def average(module, query, key, value, attention_mask, **kwargs):
    """Attention that looks at all visible positions alike."""
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    n, keys = query.shape[2], value.shape[2]
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) and n > 1
        visible = torch.ones(n, keys, dtype=torch.bool)
        visible = visible.tril(keys - n) if is_causal else visible
    elif attention_mask.dtype == torch.bool:
        visible = attention_mask[..., :keys]
    else:
        visible = attention_mask[..., :keys] > -1
    weights = visible.to(value.dtype).expand(len(query), query.shape[1], n, keys)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1)
    return (weights @ value).transpose(1, 2).contiguous(), None


def parts_replaced(name: str, kinds, start: int) -> ReplaceParts:
    return ReplaceParts(part_bank(name), kinds, start)
