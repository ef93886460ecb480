"""Linear weights packed for products with a few rows.

In: a model. Out: copies of its weights in the layouts of MKL or oneDNN, used inside a `with` block
for passes of the sizes that they speed up; the same numbers up to rounding.

A pass over a handful of tokens multiplies every weight by a handful of rows. Libraries are tuned
for many rows or for one; in between, packing the weights first can take a third of the time. Which
layout is best differs by processor, so layouts are timed. The copies take as much memory as the
weights, so they are made only where there is plenty.

In bfloat16 another order of summation shows. Every row can get the bits that a product of one row
gives: where a kernel sums in another order for more rows, they are multiplied a few at a time.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layerleap.models.hooks.forward import Tap, hooks_of, tapped

MOST_ROWS = 32  # the largest size that is tried
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # relative error of a correct product
TIMED = (1, 2, 4, 8, 16, 32)  # sizes that are timed; others go with the next larger one
TYPICAL = 8  # the size by which layouts are chosen
SAMPLE = 2**26  # bytes of weights that are timed: more than caches hold
REPEATS = 3
LIMITS = ("max", "current")  # of the memory of a container


@dataclass(frozen=True)
class Layout:
    """One library's way to pack weights and to multiply by them."""

    name: str
    is_available: Callable[[torch.dtype], bool]
    pack: Callable[[Tensor], Tensor]
    # The packed weight, the weight, its bias, rows of any shape, and how many they are.
    multiply: Callable[[Tensor, Tensor, Tensor | None, Tensor, int], Tensor]


LAYOUTS = {
    "mkl": Layout(
        "mkl",
        lambda dtype: (
            dtype == torch.float32
            and torch.backends.mkl.is_available()
            and hasattr(torch.ops.mkl, "_mkl_linear")
        ),
        lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight, MOST_ROWS),
        lambda packed, weight, bias, x, n: torch.ops.mkl._mkl_linear.default(
            x, packed, weight, bias, n
        ),
    ),
    "onednn": Layout(
        "onednn",
        lambda dtype: (
            torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
        ),
        lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, MOST_ROWS),
        lambda packed, weight, bias, x, n: torch.ops.mkldnn._linear_pointwise(
            x, packed, bias, "none", [], ""
        ),
    ),
}


@dataclass(eq=False)
class _Copy:
    module: nn.Linear
    packed: Tensor
    checksum: Tensor  # of the weights that were copied
    steps: tuple[int, ...] = ()  # numbers of rows to multiply at a time; none: all at once


class Packed:
    """Copies of the plain linear weights of a model on the CPU, in float32 or bfloat16."""

    def __init__(
        self,
        layout: Layout,
        modules: Sequence[nn.Linear],
        verified: Mapping[torch.Size, frozenset[int]] | None = None,
    ) -> None:
        """Copy the weights, and verify the products of every shape, except those known as right.

        `verified` are these: by shape, the numbers of rows whose product is right.
        """
        self.layout, self.dtype = layout, modules[0].weight.dtype
        self.is_paused = False  # products are those of the weights themselves
        self.keeps_bits = True  # rows have the bits of products of one row, in bfloat16
        shapes = {module.weight.shape for module in modules} if self.dtype == torch.bfloat16 else ()
        steps = {shape: _steps(layout, *shape, self.dtype) for shape in shapes}
        self._copies = [
            _Copy(module, self._pack(module), _checksum(module), steps.get(module.weight.shape, ()))
            for module in modules
        ]
        self.verified = self._verify(verified or {})
        self.sizes = tuple(sorted(frozenset.intersection(*self.verified.values())))

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, sizes: Collection[int] | None = None) -> "Packed | None":
        """The copies, shared by all users of a model; None if not faster, or memory is short.

        They are used for the numbers of rows in `sizes`, if their products are correct; for those
        that are faster when None.
        """
        with hooks_of(model).lock:
            modules = _modules(model)
            if not modules:
                return None
            dtype, known = modules[0].weight.dtype, _PACKED.setdefault(model, {})
            if sizes is not None or dtype not in known:
                layouts = [layout for layout in LAYOUTS.values() if layout.is_available(dtype)]
                if not layouts or _bytes(modules) > _free() / 2:
                    return None
                packed = cls._fastest(modules, layouts, sizes)
                if sizes is not None:
                    return packed
                known[dtype] = packed  # None too: what was not faster is not timed again
            return known[dtype]

    @classmethod
    def _fastest(
        cls, modules: Sequence[nn.Linear], layouts: Sequence[Layout], sizes: Collection[int] | None
    ) -> "Packed | None":
        sample = _sample(modules)
        trials = [cls(layout, sample) for layout in layouts]
        best = min(trials, key=lambda trial: trial._seconds(TYPICAL))
        useful = best._useful_sizes() if sizes is None else set(sizes)
        del trials
        if not useful:
            return None
        packed = cls(best.layout, modules, best.verified)
        packed.sizes = tuple(n for n in packed.sizes if n in useful)
        return packed if packed.sizes else None

    def _pack(self, module: nn.Linear) -> Tensor:
        return self.layout.pack(module.weight.detach())

    def _verify(
        self, verified: Mapping[torch.Size, frozenset[int]]
    ) -> dict[torch.Size, frozenset[int]]:
        """By shape of weight, the sizes that give the right product: verified, not assumed."""
        shapes = {copy.module.weight.shape: copy for copy in self._copies}
        return {
            shape: verified.get(shape) or frozenset(_correct_sizes(self, copy))
            for shape, copy in shapes.items()
        }

    def _useful_sizes(self) -> set[int]:
        """Sizes for which the copies are faster than the weights."""
        is_faster = (n for n in TIMED if self._seconds(n) < self._seconds(n, plain=True))
        if self.dtype == torch.bfloat16:  # all from 2 on: the weights themselves keep no bits
            first = next(is_faster, None)
            return set() if first is None else set(range(min(2, first), MOST_ROWS + 1))
        wins = list(is_faster)
        nearest = {n: next(size for size in TIMED if size >= n) for n in range(1, MOST_ROWS + 1)}
        return {n for n, size in nearest.items() if size in wins}

    def _seconds(self, n: int, *, plain: bool = False) -> float:
        """Seconds to multiply all weights by n rows: the fastest of a few repeats."""
        weights = [copy.module.weight for copy in self._copies]
        rows = {w.shape[1]: torch.ones(1, n, w.shape[1], dtype=w.dtype) for w in weights}
        best = float("inf")
        for _ in range(REPEATS):
            started = time.perf_counter()
            for copy in self._copies:
                module, x = copy.module, rows[copy.module.in_features]
                if plain:
                    nn.functional.linear(x, module.weight, module.bias)
                else:
                    _product(self, copy, x, n)
            best = min(best, time.perf_counter() - started)
        return best

    @contextmanager
    def in_use(self, model: nn.Module) -> Iterator[None]:
        """Let linear layers use the copies; weights that have changed are copied again first."""
        self.is_paused, self.keeps_bits = False, True
        with hooks_of(model).lock:
            with torch.no_grad():  # not longer: it may end after what it began in
                taps = list(self._taps(model))
            with tapped(model, taps):
                yield

    def _taps(self, model: nn.Module) -> Iterator[tuple[nn.Module, Tap]]:
        if torch.is_autocast_enabled("cpu"):  # products are computed in another dtype
            return
        sizes, thread, hooks = frozenset(self.sizes), get_ident(), hooks_of(model)
        for copy in self._copies:
            weight = copy.module.weight
            if not _is_plain(copy.module) or hooks.instance_forward(copy.module) is not None:
                continue  # moved or adapted since
            if hooks.is_reweighted(copy.module):
                continue  # it computes with other weights
            if weight.dtype != self.dtype:
                continue  # cast since
            if not torch.equal(checksum := _checksum(copy.module), copy.checksum):
                copy.packed, copy.checksum = self._pack(copy.module), checksum
            yield copy.module, Tap(forward=partial(_forward, self, copy, sizes, thread))


_PACKED: "WeakKeyDictionary[nn.Module, dict[torch.dtype, Packed | None]]" = WeakKeyDictionary()


def _modules(model: nn.Module) -> list[nn.Linear]:
    """The linear modules that can be packed, all of one dtype: that of the largest."""
    hooks = hooks_of(model)
    modules = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and _is_plain(module)
        and hooks.instance_forward(module) is None  # adapted or offloaded: it runs its own code
    ]
    largest = max(modules, key=lambda module: module.weight.numel(), default=None)
    return [m for m in modules if largest is not None and m.weight.dtype == largest.weight.dtype]


def _bytes(modules: Sequence[nn.Linear]) -> int:
    return sum(module.weight.numel() * module.weight.element_size() for module in modules)


def _sample(modules: Sequence[nn.Linear]) -> list[nn.Linear]:
    """The first modules, until they no longer fit into caches."""
    sample: list[nn.Linear] = []
    for module in modules:
        sample.append(module)
        if _bytes(sample) > SAMPLE:
            break
    return sample


def _is_plain(module: nn.Linear) -> bool:
    weight = module.weight
    is_own = type(weight) is nn.Parameter  # a subclass may hold anything, such as quantised weights
    return is_own and weight.device.type == "cpu" and weight.dtype in TOLERANCE


def _checksum(module: nn.Linear) -> Tensor:
    """The product of the weights with a fixed vector, which changes whenever they change."""
    fixed = torch.arange(1, module.in_features + 1, dtype=torch.float32).sin()
    # In parts that fit into caches, should they have to be cast.
    return torch.cat([torch.mv(part.float(), fixed) for part in module.weight.split(256)])


def _correct_sizes(packed: Packed, copy: _Copy) -> Iterator[int]:
    weight = copy.module.weight
    bias = None if copy.module.bias is None else copy.module.bias.float()
    generator = torch.Generator().manual_seed(weight.shape[1])
    rows = torch.randn(MOST_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    expected = nn.functional.linear(rows.float(), weight.float(), bias)
    for n in range(1, MOST_ROWS + 1):
        product = _forward(packed, copy, frozenset([n]), get_ident(), rows[None, :n])[0]
        error = (product.float() - expected[:n]).norm()
        if error <= TOLERANCE[weight.dtype] * expected[:n].norm():
            yield n


def _forward(packed: Packed, copy: _Copy, sizes: frozenset[int], thread: int, x: Tensor) -> Tensor:
    weight, bias = copy.module.weight, copy.module.bias
    n = x.numel() // x.shape[-1]
    is_ours = thread == get_ident() and not torch.is_grad_enabled() and not packed.is_paused
    if n not in sizes or not is_ours or x.dtype != weight.dtype:
        return nn.functional.linear(x, weight, bias)
    return _product(packed, copy, x, n)


def _product(packed: Packed, copy: _Copy, x: Tensor, n: int) -> Tensor:
    weight, bias, layout = copy.module.weight, copy.module.bias, packed.layout
    if not (packed.keeps_bits and copy.steps) or n in copy.steps:
        return layout.multiply(copy.packed, weight, bias, x, n)
    sizes, left = [], n
    while left:
        sizes.append(max(step for step in copy.steps if step <= left))
        left -= sizes[-1]
    parts = [
        layout.multiply(copy.packed, weight, bias, rows, rows.shape[1])
        for rows in x.reshape(1, n, -1).split(sizes, 1)
    ]
    return torch.cat(parts, 1).reshape(*x.shape[:-1], -1)


@cache
def _steps(layout: Layout, d_out: int, d_in: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of rows whose product has the bits of products of one row; none if not even one has.

    Verified with sums that cancel exactly: what is left of them is rounding alone, which differs
    whenever the order of summation does.
    """
    generator = torch.Generator().manual_seed(d_in)
    half = torch.randn(d_out, (d_in + 1) // 2, generator=generator).to(dtype)
    weight = torch.cat([half, -half], 1)[:, :d_in].contiguous()
    rows = torch.randn(MOST_ROWS, half.shape[1], generator=generator).to(dtype)
    x = torch.cat([rows, rows], 1)[:, :d_in].contiguous()
    packed = layout.pack(weight)
    alone = torch.cat([nn.functional.linear(row[None, None], weight) for row in x], 1)
    return tuple(
        n
        for n in range(1, MOST_ROWS + 1)
        if torch.equal(layout.multiply(packed, weight, None, x[None, :n], n), alone[:, :n])
    )


def _free() -> float:
    """Bytes of free memory, of the machine and of the container; 0 if that is unknown."""
    try:
        pages: Any = getattr(os, "sysconf", None)
        free = float(pages("SC_AVPHYS_PAGES")) * float(pages("SC_PAGE_SIZE"))
    except (TypeError, ValueError, OSError):
        return 0.0
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in LIMITS)
        return free if limit.strip() == "max" else min(free, float(limit) - float(used))
    except (OSError, ValueError):  # no container, or one without a limit
        return free
