"""The keys of a model's neurons, verified.

In: a wrapped model and a block. Out: `Keys`: the matrices whose products with the FFN's input make
the coefficients of the neurons, and how.

    plain    coefficient = activation(key . x + bias)                  kind "ffn.key"
    gated    coefficient = activation(gate . x) * (up . x)             kinds "ffn.gate", "ffn.up"

The activation is the one of transformers' own that reproduces the recorded coefficients best. A
fused matrix (Phi-3) is split into halves, whichever way they lie.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from layerleap.errors import ModelRefused
from layerleap.models.discovery.compare import is_same, rounding, row_gap
from layerleap.models.discovery.probe import probe
from layerleap.models.discovery.trace import Call, trace
from layerleap.models.transformer import Transformer
from layerleap.models.weights.by_block import ByBlock
from layerleap.models.weights.matrices import Rows, calls_inside, last_call, matrix_of, norm_before
from layerleap.models.weights.neurons import feed_forward

ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_pytorch_tanh",
    "relu",
    "relu2",
    "quick_gelu",
    "tanh",
    "sigmoid",
    "mish",
    "linear",
)


@dataclass(frozen=True)
class Keys:
    """The keys of one block's neurons."""

    block: int
    activation: str  # as transformers calls it
    rows: dict[str, Rows]  # by kind: "ffn.key", or "ffn.gate" and "ffn.up"
    norm: str | None  # path of the norm whose output they read; None: the stream itself

    @torch.no_grad()
    def coefficients(self, transformer: Transformer, x: Tensor) -> Tensor:
        """The coefficients for inputs of the FFN: (..., d_model) -> (..., n_neurons)."""
        products = []
        for rows in self.rows.values():
            product, bias = x @ rows.of(transformer).T, rows.bias(transformer)
            products.append(product if bias is None else product + bias)
        return _coefficients(self.activation, products)


@cache
def _activation(name: str) -> nn.Module:
    module: nn.Module = ACT2FN[name]
    return module


def _coefficients(activation: str, products: list[Tensor]) -> Tensor:
    active: Tensor = _activation(activation)(products[0])
    return active * products[1] if len(products) == 2 else active


def ffn_keys(transformer: Transformer, block: int) -> Keys:
    """The keys of block `block` (1 to n_layers), discovered and verified once."""
    feed_forward(transformer, block)  # its reasons come first
    return _KEYS.of(transformer, block)


def _find(transformer: Transformer, block: int) -> Keys:
    ffn = feed_forward(transformer, block)
    with transformer.itself():
        inputs = probe(transformer.model, rows=2, seed=23)
        calls, _ = trace(transformer.model, inputs, within=transformer.blocks[block - 1])
    inside = calls_inside(transformer, block, calls)
    down = last_call(inside, ffn.down.path)
    assert down.takes is not None
    coefficients = down.takes.reshape(-1, ffn.n_neurons)
    before = [call for call in inside if call.end < down.start]
    best: tuple[float, Keys] | None = None
    for candidate, products in _candidates(transformer, block, before, ffn.n_neurons):
        for name in ACTIVATIONS:
            gap = row_gap(_coefficients(name, products), coefficients)
            if gap <= rounding(coefficients) and (best is None or gap < best[0]):
                best = gap, replace(candidate, activation=name)
    if best is None:
        raise ModelRefused(
            f"no matrix before {ffn.down.path} of {transformer.identity.name}, through any known "
            "activation, gives the coefficients of its neurons, so their keys cannot be read"
        )
    return best[1]


_KEYS = ByBlock(lambda transformer, _: partial(_find, transformer))


def _candidates(
    transformer: Transformer, block: int, calls: list[Call], n: int
) -> Iterator[tuple[Keys, list[Tensor]]]:
    """Matrices that may hold the keys, and what they gave: one, a pair, or halves of one."""
    singles: list[tuple[Call, Rows, Tensor]] = []
    for call in calls:
        if call.gives is None or call.gives.shape[-1] not in (n, 2 * n):
            continue
        rows = matrix_of(call)
        if rows is None or rows.of(transformer).shape[1] != transformer.d_model:
            continue
        gives = call.gives.reshape(-1, call.gives.shape[-1])
        if gives.shape[1] == n:
            singles.append((call, rows, gives))
        else:
            for halves in _halves(n):
                kinds = dict(zip(("ffn.gate", "ffn.up"), halves, strict=True))
                chosen = {kind: replace(rows, chosen=half) for kind, half in kinds.items()}
                products = [gives[:, list(half)] for half in halves]
                yield Keys(block, "", chosen, _norm(transformer, block, call, calls)), products
    for call, rows, gives in singles:
        yield Keys(block, "", {"ffn.key": rows}, _norm(transformer, block, call, calls)), [gives]
    for (call, gate, a), (other, up, b) in itertools.permutations(singles, 2):
        if is_same(call.takes, other.takes):
            pair = {"ffn.gate": gate, "ffn.up": up}
            yield Keys(block, "", pair, _norm(transformer, block, call, calls)), [a, b]


def _halves(n: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for first, second in ((range(n), range(n, 2 * n)), (range(0, 2 * n, 2), range(1, 2 * n, 2))):
        yield tuple(first), tuple(second)
        yield tuple(second), tuple(first)


def _norm(transformer: Transformer, block: int, call: Call, calls: list[Call]) -> str | None:
    """The norm that keys read through; after a post-norm the stream itself is normed."""
    anatomy = transformer.anatomy[block - 1]
    is_post = not isinstance(anatomy, str) and anatomy.style == "post-norm"
    return None if is_post else norm_before(call, calls)
