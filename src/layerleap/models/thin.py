"""Matrix products of few rows, the other way round.

In: a model, and the numbers of rows for which W x^T is quicker here than x W^T, as measured by
whoever runs passes of such sizes. Out: the same linear layers inside a `with` block, the same
numbers but for rounding.

A pass over a handful of tokens multiplies every weight by a handful of rows. Libraries are tuned
for many rows or for one; in between the transposed product can take half the time.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn


@contextmanager
def thin_products(model: nn.Module, sizes: Collection[int]) -> Iterator[None]:
    """Inside, plain linear layers on the CPU multiply so many rows the other way round."""
    with ExitStack() as undo:
        for module in model.modules() if sizes else ():
            # Quantised, adapted or offloaded ones are somebody else's to run.
            if type(module) is not nn.Linear or "forward" in module.__dict__:
                continue
            assert isinstance(module, nn.Linear)
            if module.weight.device.type == "cpu":
                module.__dict__["forward"] = partial(_forward, module, frozenset(sizes))
                undo.callback(module.__dict__.pop, "forward")
        yield


def _forward(module: nn.Linear, sizes: frozenset[int], x: Tensor) -> Tensor:
    if x.numel() // x.shape[-1] not in sizes:
        return nn.functional.linear(x, module.weight, module.bias)
    flat = x.reshape(-1, x.shape[-1])
    y = torch.mm(module.weight, flat.T.contiguous()).T
    y = y.contiguous() if module.bias is None else y + module.bias
    return y.reshape(*x.shape[:-1], module.out_features)
