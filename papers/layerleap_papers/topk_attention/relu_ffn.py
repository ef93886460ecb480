"""ReLU FFNs with few neurons, for counting what training keeps.

In: tokens, keys and values. Out: the output, by three implementations: the whole FFN, the paper's
function, and what the edit `TopKNeurons` does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerleap.act.edits import keep_highest

D_MODEL = 768
NEURONS = 4 * D_MODEL
FFN_K = NEURONS // 8


def topk_relu_ffn(x: Tensor, keys: Tensor, values: Tensor, k: int = FFN_K) -> Tensor:
    """The paper's ReLU FFN: of each token the k largest pre-activations, and only these are kept.

    Args:
        x: tokens, (n, width).
        keys: (neuron, width).
        values: (neuron, width).
        k: how many neurons.
    """
    output: Tensor = _TopKReluFFN.apply(x, keys, values, k)
    return output


class _TopKReluFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, values: Tensor, k: int) -> Tensor:
        top, index = (x @ keys.mT).topk(k, -1, sorted=False)
        ctx.save_for_backward(x, keys, values, top, index.int())
        return _scattered(top.relu(), index, len(keys)) @ values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, keys, values, top, index = ctx.saved_tensors
        index, grad, n = index.long(), grads[0], len(keys)
        on_values = _scattered(top.relu(), index, n).mT @ grad
        change = _scattered((grad @ values.mT).gather(-1, index) * (top > 0), index, n)
        return change @ keys, change.mT @ x, on_values, None


def _scattered(kept: Tensor, index: Tensor, n: int) -> Tensor:
    return kept.new_zeros(len(kept), n).scatter(-1, index, kept)


def _masked(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As `TopKNeurons` does it: coefficients of whole tensors are set to 0."""
    coefficients = (x @ keys.mT).relu()
    return keep_highest(FFN_K, torch.abs, coefficients) @ values


FFNS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "whole": lambda x, keys, values: (x @ keys.mT).relu() @ values,
    "top-k": topk_relu_ffn,
    "masked": _masked,
}
FFN_NAMES = {
    "whole": "whole FFN",
    "top-k": f"top {FFN_K}, as in the paper",
    "masked": f"top {FFN_K} by TopKNeurons",
}
