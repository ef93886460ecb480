"""Sites: named points inside a block, at the inputs and outputs of attention, FFN and norms.

In: the calls of one block in a trace.
Out: `{"attn.in": Site(path, "in"), ...}` and the equation by which the parts add up.

The equation is found by trying candidates. A part's contribution can be the output of a module,
of its last projection, or of a norm or learned scale after either. The residual stream can be
`x + part` (pre-norm, parallel, sandwich) or `norm(x + part)` (post-norm). The combination that
reproduces the block's output is the architecture; if none does, the block has no sites.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerleap.models.discovery.compare import is_same, sum_error
from layerleap.models.discovery.trace import Call

Style = Literal["sequential", "parallel", "post-norm"]


@dataclass(frozen=True)
class Site:
    """The input or output of a module, given by its path inside the block."""

    path: str
    side: Literal["in", "out"]


@dataclass(frozen=True)
class Anatomy:
    """The structure of one block.

    sequential, parallel: `out = in + scale * (sum of contributions)`
    post-norm:            `x = norm(x + contribution)`, part after part
    """

    style: Style
    parts: tuple[str, ...]  # "attn", "cross", "ffn" in order of execution
    adds: tuple[Site, ...]  # for each part, the site whose value is added to the stream
    scale: float = 1.0
    sites: dict[str, Site] = field(default_factory=dict)
    error: float = 0.0  # of the equation on the probe; rounding explains up to 1


@dataclass(frozen=True)
class _Part:
    """A candidate part: the call it begins with, and possible outputs."""

    name: str
    first: Call  # its input is the part's input
    outputs: tuple[Call, ...]  # candidates for the part's output, best first


def find_anatomy(block: Call, calls: Sequence[Call]) -> Anatomy | str:
    """The anatomy of one block, or the reason why it could not be determined."""
    inside = [call for call in calls if block.contains(call) and call.gives is not None]
    norms = [call for call in inside if is_norm(call.module)]
    after = [*norms, *(call for call in inside if _is_scale(call.module))]
    parts = _parts(block, inside, norms)
    if isinstance(parts, str):
        return parts
    errors = []
    for outputs in itertools.product(*(_contributions(part, after, block) for part in parts)):
        candidate = _Candidate(block, parts, outputs, norms)
        for anatomy in filter(None, (candidate.additive(), candidate.post_norm())):
            if anatomy.error <= 1:
                return replace(anatomy, **candidate.sites(anatomy.style))
            errors.append(anatomy.error)
    reason = f"{', '.join(part.name for part in parts)} do not add up to the block"
    closest = "; the closest sum is off by {:.2g} times what rounding explains"
    return reason + (closest.format(min(errors)) if errors else "")


def is_norm(module: nn.Module) -> bool:
    """True for a norm: called so, and without a matrix."""
    flat = all(parameter.dim() == 1 for parameter in module.parameters())
    return "norm" in type(module).__name__.lower() and flat


def _is_scale(module: nn.Module) -> bool:
    """True for a learned factor or shift per coordinate, as vision models have after each part."""
    return not is_norm(module) and {p.dim() for p in module.parameters()} == {1}


def _has_matrix(module: nn.Module) -> bool:
    """True if the module itself has a weight matrix; quantised modules keep it as a buffer."""
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)) or any(
        buffer.dim() == 2 for buffer in module.buffers(recurse=False)
    )


def _relative(block: Call, call: Call) -> str:
    return call.path.removeprefix(f"{block.path}.")


def attention_root(path: str) -> str | None:
    """The path up to the first component named after attention."""
    names = path.split(".")
    for index, name in enumerate(names):
        if re.search("att(n|ention)", name.lower()):
            return ".".join(names[: index + 1])
    return None


def _parts(block: Call, inside: list[Call], norms: list[Call]) -> tuple[_Part, ...] | str:
    """Attention(s) and FFN in order of execution."""
    weighted = [call for call in inside if call not in norms and _has_matrix(call.module)]
    by_root: dict[str, list[Call]] = {}
    feed_forward: list[Call] = []
    for call in weighted:
        root = attention_root(_relative(block, call))
        (by_root.setdefault(root, []) if root else feed_forward).append(call)
    if not 1 <= len(by_root) <= 2 or not feed_forward:
        return f"found {len(by_root)} attention modules and {len(feed_forward)} FFN matrices"
    parts = []
    for name, (root, members) in zip(("attn", "cross"), by_root.items(), strict=False):
        whole = next((call for call in inside if _relative(block, call) == root), None)
        parts.append(_part(name, whole, members))
    # The FFN is often one module; in BERT and OPT its matrices belong to the block itself.
    others = [*norms, *(call for members in by_root.values() for call in members)]
    whole = _smallest_containing(feed_forward, inside, but_not=others)
    parts.append(_part("ffn", whole, feed_forward))
    return tuple(parts)


def _part(name: str, whole: Call | None, members: list[Call]) -> _Part:
    ends = (members[-1],) if whole is None else (whole, members[-1])
    return _Part(name, whole or members[0], ends)


def _smallest_containing(
    members: list[Call], inside: list[Call], but_not: list[Call]
) -> Call | None:
    """The smallest call that contains all `members` and none of `but_not`."""

    def contains(call: Call, other: Call) -> bool:
        return call is other or call.contains(other)

    candidates = [
        call
        for call in inside
        if all(contains(call, member) for member in members)
        and not any(contains(call, other) for other in but_not)
    ]
    return min(candidates, key=lambda call: call.end - call.start, default=None)


def _contributions(part: _Part, after: list[Call], block: Call) -> Iterator[tuple[Call, Call]]:
    """Pairs (output of the part, value added to the stream): the same, or after a norm or scale."""
    for output in part.outputs:
        value = _as_state(output, block)
        if value is None:
            continue
        for call in after:
            if call.start > output.end and is_same(call.takes, value):
                yield output, call
        yield output, output


def _as_state(call: Call, block: Call) -> Tensor | None:
    """A call's output in the block's shape; experts work on rows without the batch axis."""
    assert block.gives is not None
    value = call.gives
    if value is None or value.numel() != block.gives.numel():
        return None
    return value.reshape(block.gives.shape).to(block.gives.device)


@dataclass(frozen=True, eq=False)
class _Candidate:
    """One way in which the parts of a block may add up."""

    block: Call
    parts: tuple[_Part, ...]
    outputs: tuple[tuple[Call, Call], ...]  # by part, its output and what is added to the stream
    norms: list[Call]

    def additive(self) -> Anatomy | None:
        """`out = in + scale * sum`, with the best-fitting scale (1 for nearly every family)."""
        before, after = self.block.takes, self.block.gives
        values = [v for _, added in self.outputs if (v := _as_state(added, self.block)) is not None]
        if len(values) < len(self.outputs) or before is None or after is None:
            return None
        plain = self._anatomy("sequential", sum_error(after, [before, *values]))
        if plain.error <= 1:
            return plain
        change = after.double() - before.to(after.device).double()
        total = torch.stack([value.double() for value in values]).sum(0)
        scale = ((total * change).sum() / total.square().sum().clamp_min(1e-300)).item()
        scaled = [before.double(), *(scale * value.double() for value in values)]
        return replace(plain, scale=scale, error=sum_error(after, scaled))

    def post_norm(self) -> Anatomy | None:
        """`x = norm(x + part)`, part after part."""
        post_norms = self._summing_norms()
        if not post_norms or self.block.gives is None:
            return None
        exact = is_same(post_norms[-1].gives, self.block.gives)
        return self._anatomy("post-norm", 0.0 if exact else float("inf"))

    def _anatomy(self, style: Style, error: float) -> Anatomy:
        adds = tuple(Site(_relative(self.block, added), "out") for _, added in self.outputs)
        return Anatomy(style, tuple(part.name for part in self.parts), adds, error=error)

    def _summing_norms(self) -> list[Call]:
        """For each part, the norm applied to the stream plus that part; empty if there is none."""
        stream, post_norms = self.block.takes, []
        for _, added in self.outputs:
            value = _as_state(added, self.block)
            if stream is None or value is None:
                return []
            total = stream.to(value.device).reshape(value.shape) + value
            norm = next((n for n in self.norms if is_same(n.takes, total)), None)
            if norm is None:
                return []
            post_norms.append(norm)
            stream = norm.gives
        return post_norms

    def sites(self, style: Style) -> dict[str, Any]:
        """Named sites around each part, and the style with parallel blocks recognised."""
        sites: dict[str, Site] = {}

        def add(name: str, first: Call, last: Call) -> None:
            sites[f"{name}.in"] = Site(_relative(self.block, first), "in")
            sites[f"{name}.out"] = Site(_relative(self.block, last), "out")

        for part, (output, _) in zip(self.parts, self.outputs, strict=True):
            add(part.name, part.first, output)
        if style == "post-norm":
            for part, norm in zip(self.parts, self._summing_norms(), strict=True):
                add(f"{part.name}_post", norm, norm)
            return {"sites": sites}
        inputs = []
        for part, (output, added) in zip(self.parts, self.outputs, strict=True):
            pre = next((norm for norm in self.norms if is_same(norm.gives, part.first.takes)), None)
            if pre is not None:
                add(f"{part.name}_norm", pre, pre)
            inputs.append((pre or part.first).takes)
            if added is not output:
                add(f"{part.name}_{'post' if added in self.norms else 'scale'}", added, added)
        # In a parallel block every part starts from the block's input.
        is_parallel = all(is_same(value, self.block.takes) for value in inputs)
        return {"sites": sites, "style": "parallel" if is_parallel else "sequential"}
