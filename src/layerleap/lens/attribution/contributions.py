"""What each part of a model adds to a score: attention and FFN, heads, neurons, heads by source.

In: one input, a readout's gradient at h[layer], and how finely to split. Out: rows that add up to
the score. With the statistics of norms fixed, the stream is a sum,

    h[layer] = h[0] + sum over blocks of scale * (attention + FFN)

and every term splits further: attention is z W_O + b_O with a slice of z for each head, z is
sum over source positions of A V, and an FFN is m V + b with a row of V for each neuron. So a score
needs no vector per head or neuron: the gradient is carried back through W_O, or V, once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from layerleap.errors import ModelRefused
from layerleap.lens.attention.recorder import Patterns, mixed_site, patterns
from layerleap.lens.attribution.prompt import OneInput
from layerleap.lens.attribution.readout import FrozenNorm, wide
from layerleap.models.discovery.sites import Anatomy, Site
from layerleap.models.hooks.capture import Capture
from layerleap.models.transformer import Transformer
from layerleap.models.weights import FeedForward, Heads, all_heads, feed_forwards

By = Literal["part", "head", "neuron", "source"]


@dataclass(frozen=True)
class Component:
    """A row: something that adds to the stream, or a constant."""

    part: str  # embedding, attn, cross, ffn, bias; or a constant of the way to the logits
    block: int | None = None
    head: int | None = None
    neuron: int | None = None
    source: int | None = None  # position that a head took it from
    rest: bool = False  # all other neurons of the block

    @property
    def name(self) -> str:
        """As in edits: L12.attn, L12.H3, L12.N34."""
        if self.block is None:
            return self.part
        if self.head is not None:
            return f"L{self.block}.H{self.head}"
        if self.neuron is not None:
            return f"L{self.block}.N{self.neuron}"
        return f"L{self.block}.{'other neurons' if self.rest else self.part}"


class Places:
    """What is captured, and which blocks are split into heads or neurons."""

    def __init__(self, transformer: Transformer, by: By, layer: int) -> None:
        self.transformer, self.by, self.blocks = transformer, by, range(1, layer + 1)
        self.notes: list[str] = []
        self.heads: dict[int, Heads] = {}
        self.ffns: dict[int, FeedForward] = {}
        name = transformer.identity.name
        if any(self.anatomy(block).style == "post-norm" for block in self.blocks):
            raise ModelRefused(
                f"{name} norms its whole stream after every part (post-norm), so what a block "
                "adds is rescaled by all later blocks, and a logit is not a sum over parts; "
                "ll.attention, ll.read and ll.neurons can read this model"
            )
        if by == "part":
            return
        known: dict[int, Any] = (feed_forwards if by == "neuron" else all_heads)(transformer)
        kept = {b: known[b] for b in self.blocks if not isinstance(known[b], str)}
        if reasons := [known[b] for b in self.blocks if b not in kept]:
            what = "neurons" if by == "neuron" else "heads"
            if not kept:
                raise ModelRefused(f"{what} cannot be told apart: {reasons[0]}")
            some = f"{len(reasons)} of {len(self.blocks)} blocks are not split into {what}"
            self.notes.append(f"{some}: {reasons[0]}")
        if by == "neuron":
            self.ffns = kept
        else:
            self.heads = kept

    def anatomy(self, block: int) -> Anatomy:
        """The parts of a block."""
        return self.transformer.known_anatomy(block, "a logit cannot be split into what they add")

    def added(self, block: int) -> dict[str, Site]:
        """By part, the site whose value is added to the stream."""
        anatomy = self.anatomy(block)
        return dict(zip(anatomy.parts, anatomy.adds, strict=True))

    def sites(self) -> list[tuple[int, str | Site]]:
        """All sites that are needed."""
        sites: list[tuple[int, str | Site]] = []
        for block in self.blocks:
            sites += [(block, site) for site in self.added(block).values()]
            if heads := self.heads.get(block):
                sites += [(block, mixed_site(self.transformer, heads)), (block, "attn.out")]
            if ffn := self.ffns.get(block):
                sites += [(block, ffn.site), (block, "ffn.out")]
        return list(dict.fromkeys(sites))


@dataclass(frozen=True, eq=False)
class Contributions:
    """What one input's components add to one score."""

    places: Places
    captured: Capture
    patterns: Mapping[int, Patterns]  # by block, if heads are split by source
    gradient: Tensor

    @classmethod
    def capture(cls, places: Places, given: OneInput) -> tuple[Capture, dict[int, Patterns]]:
        """One pass: the first and last state and all sites, at the position."""
        transformer, split = places.transformer, places.by == "source"
        blocks, ends = list(places.heads) if split else [], {0, len(places.blocks)}
        with patterns(transformer, given, blocks, given.position) as recorded:
            captured = transformer.capture(
                given.inputs, layers=ends, sites=places.sites(), keep=given.keep
            )
        return captured, recorded.found()

    def rows(self, top: int = 20) -> Iterator[tuple[Component, float]]:
        """Every component with its contribution, in order of execution; `top` neurons at most."""
        neurons = {block: self._neurons(ffn) for block, ffn in self.places.ffns.items()}
        strongest = _strongest({block: values for block, (values, _) in neurons.items()}, top)
        yield Component("embedding"), self._dot(self.gradient, self.captured.states[0])
        for block in self.places.blocks:
            scale = self.places.anatomy(block).scale
            for part, site in self.places.added(block).items():
                if part == "attn" and (heads := self.places.heads.get(block)):
                    yield from self._heads(heads)
                elif part == "ffn" and block in neurons:
                    values, constant = neurons[block]
                    for neuron in strongest[block]:
                        yield Component("ffn", block, neuron=neuron), float(values[neuron])
                    left = torch.ones_like(values)
                    left[strongest[block]] = 0
                    yield Component("ffn", block, rest=True), float(values @ left)
                    yield from self._constant("ffn bias", block, constant)
                else:
                    value = self.captured.sites[block, site]
                    yield Component(part, block), scale * self._dot(self.gradient, value)

    def _dot(self, gradient: Tensor, value: Tensor) -> float:
        return float(gradient.cpu().double() @ value.reshape(-1).cpu().double())

    def _back(self, block: int, part: str, after: str | None, scale: float) -> tuple[Tensor, float]:
        """The gradient in a part's own output, and what a norm after it adds to the score."""
        gradient = self.gradient * scale
        if after is None:
            return gradient, 0.0
        module = self.places.transformer.model.get_submodule(after)
        norm = FrozenNorm.at(module, self.captured.sites[block, f"{part}.out"])
        return norm.back(gradient), norm.constant(gradient)

    def _heads(self, heads: Heads) -> Iterator[tuple[Component, float]]:
        transformer, block = self.places.transformer, heads.block
        gradient, shift = self._back(block, "attn", heads.after, heads.scale)
        weight = heads.outputs.of(transformer)
        inside = (gradient.to(weight.device) @ wide(weight)).reshape(heads.n_heads, -1)
        if pattern := self.patterns.get(block):
            taken = pattern.values.double() @ inside.cpu().double()[:, :, None]
            by_source = pattern.weights[:, 0].double() * taken[..., 0]
            for head, row in enumerate(by_source.tolist()):
                for source, value in enumerate(row):
                    yield Component("attn", block, head, source=source), value
        else:
            mixed = self.captured.sites[block, mixed_site(transformer, heads)].cpu().double()
            by_head = (mixed.reshape(inside.shape) * inside.cpu().double()).sum(1)
            for head, value in enumerate(by_head.tolist()):
                yield Component("attn", block, head), value
        constant = shift + self._bias(gradient, heads.outputs.bias(transformer))
        yield from self._constant("attn bias", block, constant)

    def _neurons(self, ffn: FeedForward) -> tuple[Tensor, float]:
        """What each neuron of a block adds, and what the block's FFN adds whatever they do."""
        transformer = self.places.transformer
        gradient, shift = self._back(ffn.block, "ffn", ffn.after, ffn.scale)
        values = ffn.values(transformer)
        inside = (wide(values) @ gradient.to(values.device)).cpu().double()
        coefficients = self.captured.sites[ffn.block, ffn.site].reshape(-1).cpu().double()
        return coefficients * inside, shift + self._bias(gradient, ffn.bias(transformer))

    def _bias(self, gradient: Tensor, bias: Tensor | None) -> float:
        return 0.0 if bias is None else self._dot(gradient, wide(bias))

    def _constant(self, part: str, block: int, value: float) -> Iterator[tuple[Component, float]]:
        if value:
            yield Component(part, block), value


def _strongest(neurons: Mapping[int, Tensor], top: int) -> dict[int, list[int]]:
    """By block, which neurons are among the `top` of all blocks, strongest first."""
    places = [(block, neuron) for block, values in neurons.items() for neuron in range(len(values))]
    strongest: dict[int, list[int]] = {block: [] for block in neurons}
    if places:
        sizes = torch.cat([values.abs() for values in neurons.values()])
        for index in sizes.topk(min(top, len(sizes))).indices.tolist():
            block, neuron = places[index]
            strongest[block].append(neuron)
    return strongest
