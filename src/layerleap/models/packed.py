"""Linear weights laid out for products with a few rows.

In: a model. Out: copies of its weights as MKL packs them, used inside a `with` block for passes of
chosen sizes; the same numbers but for rounding.

A pass over a handful of tokens multiplies every weight by a handful of rows. Libraries are tuned
for many rows or for one; in between, laying weights out first can take a third of the time. The
copies take as much memory as the weights, so they are made only where there is plenty.
"""

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

MOST_ROWS = 32  # sizes up to here are tried
LIMITS = ("max", "current")  # of the memory of a container


@dataclass(eq=False)
class _Copy:
    module: nn.Linear
    layout: Tensor
    mark: Tensor  # of the weights that were copied


class Packed:
    """Copies of the plain float32 linear weights of a model on the CPU."""

    def __init__(self, copies: list[_Copy]) -> None:
        self._copies = copies
        self.sizes = self._right()

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module) -> Self | None:
        """The copies; None where there is nothing to gain, or no memory for them."""
        if not torch.backends.mkl.is_available() or not hasattr(torch.ops.mkl, "_mkl_linear"):
            return None
        # Quantised, adapted or offloaded ones are somebody else's to run.
        found = [
            module
            for module in model.modules()
            if type(module) is nn.Linear and "forward" not in module.__dict__ and _is_plain(module)
        ]  # fmt: skip
        needed = sum(module.weight.numel() * 4 for module in found)
        if not found or needed > _free() / 2:
            return None
        return cls([_Copy(one, _laid_out(one), _mark(one)) for one in found])

    def _right(self) -> tuple[int, ...]:
        """Sizes for which every shape gives the right product: the layout is asked, not trusted."""
        kinds = {one.module.weight.shape: one for one in self._copies}.values()
        return tuple(n for n in range(2, MOST_ROWS + 1) if all(_agrees(one, n) for one in kinds))

    @contextmanager
    def at(self, sizes: Collection[int]) -> Iterator[None]:
        """Inside, linear layers use the copies for such sizes; changed weights are copied first."""
        chosen = frozenset(sizes) & set(self.sizes)
        if torch.is_autocast_enabled("cpu"):  # products are then made in another dtype
            chosen = frozenset()
        with ExitStack() as undo, torch.no_grad():
            for one in self._copies if chosen else ():
                if not _is_plain(one.module):
                    continue  # it has been moved or cast since
                if not torch.equal(mark := _mark(one.module), one.mark):
                    one.layout, one.mark = _laid_out(one.module), mark
                own = one.module.__dict__
                if "forward" in own:
                    continue  # somebody else's by now
                weight, bias = one.module.weight, one.module.bias
                thread = threading.get_ident()
                own["forward"] = partial(_forward, weight, bias, one.layout, chosen, thread)
                undo.callback(own.pop, "forward")
            yield


def _is_plain(module: nn.Linear) -> bool:
    weight = module.weight
    is_own = type(weight) is nn.Parameter  # and no subclass, which would know better
    return is_own and weight.device.type == "cpu" and weight.dtype == torch.float32


def _laid_out(module: nn.Linear) -> Tensor:
    made: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(module.weight.detach(), MOST_ROWS)
    return made


def _mark(module: nn.Linear) -> Tensor:
    """Changes with the weights, whoever changes them: their product with a fixed vector."""
    n = module.in_features
    return torch.mv(module.weight, torch.arange(1, n + 1, dtype=torch.float32).sin())


def _agrees(one: _Copy, n: int) -> bool:
    module = one.module
    rows = torch.randn(n, module.in_features, generator=torch.Generator().manual_seed(n))
    wanted = nn.functional.linear(rows, module.weight, module.bias)
    size, thread = frozenset([n]), threading.get_ident()
    found = _forward(module.weight, module.bias, one.layout, size, thread, rows[None])[0]
    error = (found - wanted).norm()
    return bool(error <= 1e-5 * wanted.norm())


def _forward(
    weight: Tensor,
    bias: Tensor | None,
    layout: Tensor,
    sizes: frozenset[int],
    thread: int,
    x: Tensor,
) -> Tensor:
    n = x.numel() // x.shape[-1]
    is_ours = thread == threading.get_ident() and not torch.is_grad_enabled()
    if n not in sizes or not is_ours or x.dtype != torch.float32:
        return nn.functional.linear(x, weight, bias)
    made: Tensor = torch.ops.mkl._mkl_linear.default(x, layout, weight, bias, n)
    return made


def _free() -> float:
    """Bytes of memory that nobody uses, by machine and by container; 0 if it cannot be told."""
    try:
        pages: Any = getattr(os, "sysconf", None)
        free = float(pages("SC_AVPHYS_PAGES")) * float(pages("SC_PAGE_SIZE"))
    except (TypeError, ValueError, OSError):
        return 0.0
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in LIMITS)
        return free if limit.strip() == "max" else min(free, float(limit) - float(used))
    except (OSError, ValueError):  # no container, or none that says so
        return free
