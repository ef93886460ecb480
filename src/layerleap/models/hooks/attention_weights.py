"""The weights of attention, read from whatever function computes it.

In: a wrapped model and blocks. Out: by block, how much each query weighs each key, after masks,
windows, caps, sinks and biases: (batch, head, query, key).

The output of an attention function is linear in the values that it is given. So it is called once
more with the unit vectors as values, and what it gives then are the weights themselves.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.discovery.sites import attention_root
from layerleap.models.hooks.attention import attention_wrapped_by, unit_values
from layerleap.models.inputs import Order

if TYPE_CHECKING:
    from layerleap.models.transformer import Transformer


class AttentionWeights:
    """Goes around attention functions and keeps the weights of some blocks."""

    def __init__(self, transformer: "Transformer", blocks: Collection[int]) -> None:
        self.transformer, self.blocks = transformer, sorted(blocks)
        self._weights: dict[int, Tensor] = {}
        self._to_run: dict[nn.Module, list[int]] = {}  # a shared block runs once per layer
        for block in self.blocks:
            anatomy = transformer.known_anatomy(block, "its attention cannot be read")
            root = attention_root(anatomy.sites["attn.out"].path)
            path = transformer.blocks[block - 1]
            own = transformer.model.get_submodule(f"{path}.{root}" if root else path)
            runs = [n for n, other in enumerate(transformer.blocks, 1) if other == path]
            self._to_run |= {module: list(runs) for module in own.modules()}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the passes inside."""
        if not self.blocks:
            yield
            return
        with attention_wrapped_by(self):
            yield

    def __call__(
        self,
        function: Callable[..., tuple[Any, Any]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[Any, Any]:
        """As `function`; queries and keys are (batch, head, pos, width)."""
        runs = self._to_run.get(module)
        block = runs.pop(0) if runs else None
        if block is not None and block in self.blocks:
            with torch.no_grad():
                weights, _ = function(module, query, key, unit_values(value), *args, **options)
            self._weights[block] = weights.reshape(*weights.shape[:2], -1, key.shape[2])
        return function(module, query, key, value, *args, **options)

    def rows(self, order: Order | None, keep: Tensor | None) -> dict[int, Tensor]:
        """The weights by block, in the caller's order of positions; of kept queries alone."""
        if missing := [block for block in self.blocks if block not in self._weights]:
            raise ModelRefused(
                f"attention of block {missing[0]} of {self.transformer.identity.name} does not go "
                "through transformers' attention interface, so its weights cannot be read"
            )
        found = {}
        for block, weights in self._weights.items():  # (batch, query, head, key)
            if order is not None:
                by_key = order.restore(order.restore(weights).permute(0, 3, 1, 2))
                weights = by_key.permute(0, 2, 3, 1)
            is_all = keep is None
            found[block] = weights.transpose(1, 2) if is_all else weights[keep.to(weights.device)]  # type: ignore[union-attr]
        return found
