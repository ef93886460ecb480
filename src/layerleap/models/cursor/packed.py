"""Linear weights laid out for products with a few rows.

In: a model. Out: copies of its weights as MKL or oneDNN lay them out, used inside a `with` block
for passes of the sizes that they make quicker; the same numbers but for rounding.

A pass over a handful of tokens multiplies every weight by a handful of rows. Libraries are tuned
for many rows or for one; in between, laying weights out first can take a third of the time. Which
layout is best differs by processor, so they are timed. The copies take as much memory as the
weights, so they are made only where there is plenty.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

MOST_ROWS = 32  # sizes up to here are tried
TIMED = (1, 2, 4, 8, 16, 32)  # those that are timed; others go with the next larger one
TYPICAL = 8  # the size by which layouts are chosen
SAMPLE = 2**26  # bytes of weights that are timed: more than caches hold
REPEATS = 3
LIMITS = ("max", "current")  # of the memory of a container


@dataclass(frozen=True)
class Layout:
    """One library's way to lay weights out and to multiply by them."""

    is_there: Callable[[], bool]
    lay_out: Callable[[Tensor], Tensor]
    # The layout, the weight itself, its bias, rows of any shape, and how many they are.
    multiply: Callable[[Tensor, Tensor, Tensor | None, Tensor, int], Tensor]


LAYOUTS = {
    "mkl": Layout(
        lambda: torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"),
        lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight, MOST_ROWS),
        lambda laid, weight, bias, x, n: torch.ops.mkl._mkl_linear.default(
            x, laid, weight, bias, n
        ),
    ),
    "onednn": Layout(
        lambda: (
            torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        ),
        lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, MOST_ROWS),
        lambda laid, weight, bias, x, n: torch.ops.mkldnn._linear_pointwise(
            x, laid, bias, "none", [], ""
        ),
    ),
}


@dataclass(eq=False)
class _Copy:
    module: nn.Linear
    laid: Tensor
    mark: Tensor  # of the weights that were copied


class Packed:
    """Copies of the plain float32 linear weights of a model on the CPU."""

    def __init__(self, layout: Layout, modules: Sequence[nn.Linear]) -> None:
        self.layout = layout
        self._copies = [_Copy(one, self._laid_out(one), _mark(one)) for one in modules]
        self.sizes = self._right()

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, sizes: Collection[int] | None = None) -> "Packed | None":
        """The copies; None where there is nothing to gain, or no memory for them.

        All who ask about the same model share them.

        Args:
            model: any.
            sizes: what they are used for, if they give the right products; those that they make
                quicker when None.
        """
        if sizes is None and model not in _MADE and (made := cls._of(model, None)) is not None:
            _MADE[model] = made
        return _MADE.get(model) if sizes is None else cls._of(model, sizes)

    @classmethod
    def _of(cls, model: nn.Module, sizes: Collection[int] | None) -> Self | None:
        # Quantised, adapted or offloaded ones are somebody else's to run.
        found = [
            module
            for module in model.modules()
            if type(module) is nn.Linear and "forward" not in module.__dict__ and _is_plain(module)
        ]  # fmt: skip
        kinds = [layout for layout in LAYOUTS.values() if layout.is_there()]
        if not found or not kinds or _bytes(found) > _free() / 2:
            return None
        few = _sample(found)
        tried = [cls(layout, few) for layout in kinds]
        best = min(tried, key=lambda one: one._seconds(TYPICAL))
        wanted = best._quicker() if sizes is None else sizes
        del tried
        made = cls(best.layout, found)
        made.sizes = tuple(n for n in made.sizes if n in wanted)
        return made if made.sizes else None

    def _laid_out(self, module: nn.Linear) -> Tensor:
        return self.layout.lay_out(module.weight.detach())

    def _right(self) -> tuple[int, ...]:
        """Sizes for which every shape gives the right product: the layout is asked, not trusted."""
        kinds = {one.module.weight.shape: one for one in self._copies}.values()
        sizes = range(1, MOST_ROWS + 1)
        return tuple(n for n in sizes if all(_agrees(self.layout, one, n) for one in kinds))

    def _quicker(self) -> set[int]:
        """Sizes for which the copies are quicker than the weights as they are."""
        wins = [n for n in TIMED if self._seconds(n) < self._seconds(n, plain=True)]
        nearest = {n: next(size for size in TIMED if size >= n) for n in range(1, MOST_ROWS + 1)}
        return {n for n, size in nearest.items() if size in wins}

    def _seconds(self, n: int, *, plain: bool = False) -> float:
        """Of products of all weights with n rows: the quickest of a few turns."""
        widths = {one.module.in_features for one in self._copies}
        rows = {width: torch.ones(1, n, width) for width in widths}
        best = float("inf")
        for _ in range(REPEATS):
            started = time.perf_counter()
            for one in self._copies:
                module, x = one.module, rows[one.module.in_features]
                if plain:
                    nn.functional.linear(x, module.weight, module.bias)
                else:
                    self.layout.multiply(one.laid, module.weight, module.bias, x, n)
            best = min(best, time.perf_counter() - started)
        return best

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, linear layers use the copies; changed weights are copied first."""
        # Under autocast products are made in another dtype.
        is_used = not torch.is_autocast_enabled("cpu")
        with ExitStack() as undo, torch.no_grad():
            for one in self._copies if is_used else ():
                if not _is_plain(one.module):
                    continue  # it has been moved or cast since
                if not torch.equal(mark := _mark(one.module), one.mark):
                    one.laid, one.mark = self._laid_out(one.module), mark
                own = one.module.__dict__
                if "forward" in own:
                    continue  # somebody else's by now
                thread = threading.get_ident()
                own["forward"] = partial(_forward, self.layout, one, frozenset(self.sizes), thread)
                undo.callback(own.pop, "forward")
            yield


_MADE: "WeakKeyDictionary[nn.Module, Packed]" = WeakKeyDictionary()


def _bytes(modules: Sequence[nn.Linear]) -> int:
    return sum(module.weight.numel() * 4 for module in modules)


def _sample(modules: Sequence[nn.Linear]) -> list[nn.Linear]:
    """The first ones, as many as caches cannot hold."""
    found: list[nn.Linear] = []
    for module in modules:
        found.append(module)
        if _bytes(found) > SAMPLE:
            break
    return found


def _is_plain(module: nn.Linear) -> bool:
    weight = module.weight
    is_own = type(weight) is nn.Parameter  # and no subclass, which would know better
    return is_own and weight.device.type == "cpu" and weight.dtype == torch.float32


def _mark(module: nn.Linear) -> Tensor:
    """Changes with the weights, whoever changes them: their product with a fixed vector."""
    n = module.in_features
    return torch.mv(module.weight, torch.arange(1, n + 1, dtype=torch.float32).sin())


def _agrees(layout: Layout, one: _Copy, n: int) -> bool:
    module = one.module
    rows = torch.randn(n, module.in_features, generator=torch.Generator().manual_seed(n))
    wanted = nn.functional.linear(rows, module.weight, module.bias)
    found = _forward(layout, one, frozenset([n]), threading.get_ident(), rows[None])[0]
    error = (found - wanted).norm()
    return bool(error <= 1e-5 * wanted.norm())


def _forward(layout: Layout, one: _Copy, sizes: frozenset[int], thread: int, x: Tensor) -> Tensor:
    weight, bias = one.module.weight, one.module.bias
    n = x.numel() // x.shape[-1]
    is_ours = thread == threading.get_ident() and not torch.is_grad_enabled()
    if n not in sizes or not is_ours or x.dtype != torch.float32:
        return nn.functional.linear(x, weight, bias)
    return layout.multiply(one.laid, weight, bias, x, n)


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
