"""Parameters of one model translated into the basis of another.

In: two models stitched by a matrix K, h_B = h_A K. Out: `Translated`: copies of B's last blocks and
of its tail whose parameters are vectors of A's residual stream, so that they run on A's states.

    a vector w that reads the stream       becomes  K w      h_A (K w) = (h_A K) w
    a vector v that writes to the stream   becomes  v K^+    (v K^+) K = v
    a norm x -> n(x) of the stream         becomes  x -> n(x K) K^+

A stream of A with these blocks on it is, seen through K, the stream of B after a splice. So both
give the same logits, if K has a left inverse: A is at least as wide as B and K has full rank.

Which modules read and write is looked up in the anatomy of each block, by the values they take and
give. B itself is not changed.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.act.stitch.stitched import Stitched
from layerleap.errors import BadSettings, ModelRefused
from layerleap.maps.map import Map
from layerleap.models.discovery.compare import is_same
from layerleap.models.discovery.probe import probe
from layerleap.models.discovery.sites import Anatomy
from layerleap.models.discovery.trace import Call, trace
from layerleap.models.hooks.edit import unedited
from layerleap.models.hooks.recording import record
from layerleap.models.transformer import Transformer

NORMS = ("_norm.in", "_post.in", "_scale.in")  # ends of the names of sites around norms and scales


@dataclass(frozen=True, eq=False)
class Translated:
    """A's first blocks, then the last blocks and the tail of B in the basis of A."""

    stitched: Stitched
    blocks: tuple[nn.Module, ...]  # those after layer_b
    tail: dict[str, nn.Module]  # modules of the tail, by their path in B

    def __repr__(self) -> str:
        s = self.stitched
        return (
            f"Translated(the last {len(self.blocks)} blocks and tail of {s.b.identity.name}, "
            f"in the basis of {s.a.identity.name})"
        )

    @torch.no_grad()
    def __call__(self, inputs: Any) -> Tensor:
        """The logits of every real position, (row, d_vocab); of a classifier, (batch, class)."""
        a, b, layer = self.stitched.a, self.stitched.b, self.stitched.layer_a
        arguments = self.stitched.arguments(inputs)
        h = a.capture(arguments, layers=[layer]).states[layer]
        recording = record(b, arguments)  # for the masks and positions that B's blocks are given
        h = h if recording.order is None else recording.order.arrange(h)
        for call, block in zip(recording.calls[self.stitched.layer_b :], self.blocks, strict=True):
            h = replace(call, module=block)(h)
        h = h if recording.order is None else recording.order.restore(h)
        value = b.rows(h, b.pooled(arguments["attention_mask"]))[:, None]
        b.require_tail()
        for step in b.tail:
            translated = self.tail.get(step.path) if step.kind == "module" else None
            value = b.apply(step, value) if translated is None else translated(value)
        return value.reshape(len(value), b.d_vocab)


def translate(stitched: Stitched) -> Translated:
    """B's last blocks and tail in the basis of A; both models must be stitched by a matrix."""
    b, basis = stitched.b, _Basis(stitched)
    if b.row_kind != "position":
        raise ModelRefused(
            f"the head of {b.identity.name} pools positions; only heads that read one position are "
            "translated"
        )
    with unedited(b.model):
        calls, _ = trace(b.model, probe(b.model, rows=2, seed=23))
    blocks = tuple(
        _translated_block(b, number, calls, basis)
        for number in range(stitched.layer_b + 1, b.n_layers + 1)
    )
    return Translated(stitched, blocks, dict(_translated_tail(b, basis)))


class _Basis:
    """K and its left inverse, and how modules of B look in the basis of A."""

    def __init__(self, stitched: Stitched) -> None:
        a, b, carry = stitched.a, stitched.b, stitched.map
        affine = carry.affine(a.d_model) if isinstance(carry, Map) else None
        if affine is None or affine[1] is not None:
            raise BadSettings(
                "only parameters behind a matrix can be translated; expected a kernel without a "
                "bias, such as kernel='embedding'"
            )
        kernel = affine[0].detach().cpu()
        rank = int(torch.linalg.matrix_rank(kernel))
        if rank < b.d_model:
            raise BadSettings(
                f"the kernel of {a.d_model} x {b.d_model} has rank {rank} and no left inverse, so "
                f"what {b.identity.name} writes cannot be put into the stream of "
                f"{a.identity.name}; expected rank {b.d_model}, which needs a first model that is "
                "at least as wide as the second"
            )
        self.kernel, self.inverse = kernel, torch.linalg.pinv(kernel)
        self.dtype = torch.promote_types(b.model.dtype, torch.float32)
        self.device = b.device(b.n_layers)

    def reader(self, module: nn.Module) -> nn.Linear:
        """A matrix that takes states: each of its outputs reads K w."""
        weight, bias = _matrix(module)
        return self._linear(weight @ self.kernel.T, bias)

    def writer(self, module: nn.Module) -> nn.Linear:
        """A matrix that gives states: each of its inputs writes v K^+."""
        weight, bias = _matrix(module)
        return self._linear(self.inverse.T @ weight, None if bias is None else bias @ self.inverse)

    def inside(self, module: nn.Module) -> "_Inside":
        """A norm or scale of the stream."""
        kernel, inverse = (m.to(self.device, self.dtype) for m in (self.kernel, self.inverse))
        return _Inside(copy.deepcopy(module), kernel, inverse)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> nn.Linear:
        place: Any = {"device": self.device, "dtype": self.dtype}
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, **place)
        with torch.no_grad():
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        return linear.requires_grad_(False)


class _Inside(nn.Module):
    """A module of B's stream for a stream in the basis of A."""

    def __init__(self, module: nn.Module, kernel: Tensor, inverse: Tensor) -> None:
        super().__init__()
        self.module, self.kernel, self.inverse = module, kernel, inverse

    def forward(self, x: Tensor) -> Tensor:
        """n(x K) K^+."""
        y: Tensor = self.module(x @ self.kernel)
        return y @ self.inverse


def _matrix(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias in float64, of `nn.Linear` or of transformers' `Conv1D`."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    weight = weight.detach().cpu().double()
    weight = weight if isinstance(module, nn.Linear) else weight.T
    return weight, bias.detach().cpu().double() if isinstance(bias, Tensor) else None


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_leaf = next(module.children(), None) is None
    return is_leaf and isinstance(weight, Tensor) and weight.dim() == 2


def _translated_block(b: Transformer, number: int, traced: list[Call], basis: _Basis) -> nn.Module:
    path = b.blocks[number - 1]
    if b.blocks.count(path) > 1:
        raise ModelRefused(
            f"the blocks of {b.identity.name} share their weights, which cannot be translated for "
            "some layers only"
        )
    anatomy = b.known_anatomy(number, "its parameters cannot be translated")
    inside = [call for call in traced if call.path.startswith(f"{path}.")]
    calls = {call.path.removeprefix(f"{path}."): call for call in inside}
    block = copy.deepcopy(b.block(number))
    for name, module in _new_modules(b, number, anatomy, calls, basis):
        block.set_submodule(name, module)
    return block


def _new_modules(
    b: Transformer, number: int, anatomy: Anatomy, calls: dict[str, Call], basis: _Basis
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a block that touch the stream, by path, each in the other basis."""
    sites = anatomy.sites
    for name in sites:
        if name.endswith(NORMS):
            yield sites[name].path, basis.inside(calls[sites[name].path].module)
    for part in anatomy.parts:
        state = calls[sites[f"{part}.in"].path].takes
        update = calls[sites[f"{part}.out"].path].gives
        matrices = {name: call for name, call in calls.items() if _is_matrix(call.module)}
        readers = [name for name, call in matrices.items() if is_same(call.takes, state)]
        writers = [name for name, call in matrices.items() if is_same(call.gives, update)]
        if not readers or len(writers) != 1:
            raise ModelRefused(
                f"{part} of block {number} of {b.identity.name} does not read and write the stream "
                "with matrices of its own, so its parameters cannot be translated"
            )
        yield from ((name, basis.reader(calls[name].module)) for name in readers)
        yield writers[0], basis.writer(calls[writers[0]].module)


def _translated_tail(b: Transformer, basis: _Basis) -> Iterator[tuple[str, nn.Module]]:
    """The tail's modules up to its first matrix, which leaves the stream."""
    for step in b.tail:
        if step.kind != "module":
            continue
        module = b.model.get_submodule(step.path)
        if _is_matrix(module):
            yield step.path, basis.reader(module)
            return
        if any(_is_matrix(inner) for inner in module.modules()):
            break
        yield step.path, basis.inside(module)
    raise ModelRefused(
        f"the head of {b.identity.name} does not begin with norms and one matrix, so it cannot be "
        "translated"
    )
