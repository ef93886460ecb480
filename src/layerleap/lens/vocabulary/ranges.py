"""Natural ranges: which values the coefficient of each neuron takes on a reference text.

In: a wrapped model and a text. Out: for every neuron of every block the lowest and highest value,
mean, standard deviation and the share of positions where it is positive. One pass, constant memory.

The first token of each text is left out: many models park outsized activations there (attention
sinks), and the range would say nothing about all other positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerleap.errors import BadText, NotFinite
from layerleap.models.discovery.trace import state_taken
from layerleap.models.hooks.capture import capture
from layerleap.models.hooks.forward import Args, Kwargs, Tap, tapped
from layerleap.models.transformer import Transformer
from layerleap.models.weights import FeedForward
from layerleap.progress import Progress, silent
from layerleap.results.plain import Plain
from layerleap.stream.batches import batches_of
from layerleap.stream.examples import Batch, Sampling
from layerleap.stream.source import resolve_text

AT_ONCE = 256  # tokens between two calls of `progress`: a server answers others then


@dataclass(frozen=True)
class Range(Plain):
    """The values of one coefficient on a reference text."""

    low: float
    mean: float
    high: float
    std: float
    positive: float  # share of the positions with a value above 0

    def outside(self, value: float) -> str:
        """How far a value lies outside of the range, in words; "" if it does not."""
        away = max(self.low - value, value - self.high)
        if away <= 0:
            return ""
        width = self.high - self.low
        times = f", by {away / width:,.1f} times its width" if width else ""
        return f"{value:g} is outside its natural range, {self.low:.3g} to {self.high:.3g}{times}"


class BlockRanges:
    """Ranges of the neurons of one block; rows are added batch by batch."""

    def __init__(self, n_neurons: int) -> None:
        self.n = 0
        self.low = torch.full((n_neurons,), torch.inf)
        self.high = torch.full((n_neurons,), -torch.inf)
        self.positive = torch.zeros(n_neurons, dtype=torch.int64)
        self.mean = torch.zeros(n_neurons, dtype=torch.float64)
        self.squares = torch.zeros(n_neurons, dtype=torch.float64)  # of distances to the mean

    def add(self, rows: Tensor) -> None:
        """Add coefficients: (row, n_neurons)."""
        rows = rows.detach().float().cpu()
        if not (m := len(rows)):
            return
        self.low = torch.minimum(self.low, rows.amin(0))
        self.high = torch.maximum(self.high, rows.amax(0))
        self.positive += (rows > 0).sum(0)
        mean = rows.mean(0, dtype=torch.float64)
        squares = rows.double().sub_(mean).square_().sum(0)
        shift, total = mean - self.mean, self.n + m
        self.squares += squares + shift.square() * (self.n * m / total)  # Chan et al. (1979)
        self.mean += shift * (m / total)
        self.n = total

    def table(self) -> list[tuple[float, float, float, float, float]]:
        """One row per neuron: low, mean, high, std, positive."""
        std = (self.squares / self.n).sqrt()
        share = self.positive.double() / self.n
        columns = (self.low, self.mean, self.high, std, share)
        return list(zip(*(column.tolist() for column in columns), strict=True))


def natural_ranges(
    transformer: Transformer,
    ffns: Sequence[FeedForward],
    text: Any,
    *,
    n_texts: int,
    progress: Progress = silent,
) -> dict[int, BlockRanges]:
    """The ranges of each block's neurons on the first `n_texts` sentences of a text.

    They are those of the model without the edits in force.
    """
    ranges = {ffn.block: BlockRanges(ffn.n_neurons) for ffn in ffns}
    blocks: dict[nn.Module, list[int]] = {}  # a shared block (ALBERT) has the same module in many
    for ffn in ffns:
        blocks.setdefault(ffn.module(transformer), []).append(ffn.block)
    # Causal texts are cut at a single position; of a masked model only a few may be masked.
    sampling = Sampling(positions="one" if transformer.kind == "masked-token" else "all")
    source, sampling = resolve_text(transformer, text, sampling, progress, n_generated=n_texts)
    done = 0
    for batch in batches_of(
        transformer, source, sampling, side="both", n_texts=n_texts, tokens_per_batch=AT_ONCE
    ):
        with transformer.itself():
            _add_pass(transformer, blocks, ranges, batch)
        progress("natural ranges", done := done + batch.n_texts, n_texts)
    if not any(one.n for one in ranges.values()):
        raise BadText(
            f"{text!s:.60} has no text with two tokens or more, so coefficients have no natural "
            "range; give a longer text"
        )
    return ranges


def _add_pass(
    transformer: Transformer,
    blocks: Mapping[nn.Module, Sequence[int]],
    ranges: Mapping[int, BlockRanges],
    batch: Batch,
) -> None:
    """Run one batch, up to the last block, and add what enters each down-projection."""
    keep = batch.mask.bool().clone()
    keep[:, 0] = False  # texts are padded on the right, so this is the first token of each
    calls = {module: iter(numbers) for module, numbers in blocks.items()}

    def see(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        value = state_taken(args, kwargs)
        assert value is not None
        block = next(calls[module])
        rows = value.reshape(*keep.shape, -1)[keep.to(value.device)]
        if not rows.isfinite().all():
            raise NotFinite(
                f"a coefficient of block {block} of {transformer.identity.name} is NaN or "
                "infinite; load the model in a wider dtype"
            )
        ranges[block].add(rows)

    with tapped(transformer.model, {m: Tap(see_input=partial(see, m)) for m in blocks}):
        capture(transformer, batch.inputs, layers=(transformer.n_layers,))
