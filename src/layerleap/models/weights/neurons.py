"""The neurons of a model's FFNs, verified: coefficients, value vectors and keys.

In: a wrapped model and a block. Out: `FeedForward`: where the coefficients of the neurons enter the
down-projection, and the value vector of each neuron; or `ModelRefused` with the reason.

    FFN output = sum over neurons of coefficient * value + bias
    added to the stream = FFN output, or norm(FFN output) in some families (Gemma 2), times a scale

For the statistics of one position such a norm is linear, so it can be applied to every term of the
sum: `FeedForward.into_stream`.

The down-projection is the matrix that gives the output of the FFN, whatever its class: `nn.Linear`,
`Conv1D`, with or without a gate in front. The equation is verified on a probe, when it is first
asked for, so that loading a model does not take longer. A mixture of experts has no such matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.discovery.compare import ROUNDING, is_same, rounding, row_gap
from layerleap.models.discovery.probe import probe
from layerleap.models.discovery.sites import Anatomy, Site
from layerleap.models.discovery.trace import Call, trace
from layerleap.models.transformer import Transformer
from layerleap.models.weights.by_block import ByBlock, Find
from layerleap.models.weights.matrices import (
    Rows,
    after_part,
    calls_inside,
    has_matrix,
    last_call,
    matrix_of,
)
from layerleap.models.weights.norms import Fold, norm_gain


@dataclass(frozen=True)
class FeedForward:
    """The neurons of one block."""

    block: int  # 1 to n_layers
    down: Rows  # the down-projection: a column per neuron; what it takes are the coefficients
    n_neurons: int
    site: Site  # what the down-projection takes, for `capture`
    after: str | None = None  # path of a norm or learned scale on the way to the stream
    centres: bool = False  # that norm subtracts the mean, as LayerNorm does
    scale: float = 1.0  # of everything that the block adds to the stream

    def module(self, transformer: Transformer) -> nn.Module:
        """The down-projection."""
        return transformer.model.get_submodule(self.down.path)

    def values(self, transformer: Transformer) -> Tensor:
        """The value vectors: (n_neurons, d_model), a view of the weights."""
        return self.down.of(transformer).T

    def bias(self, transformer: Transformer) -> Tensor | None:
        """What the FFN adds whatever its input: (d_model,)."""
        return self.down.bias(transformer)

    @torch.no_grad()
    def written(self, transformer: Transformer, neurons: Sequence[int] | None = None) -> Tensor:
        """What a coefficient of 1 adds to the stream, in float32 or wider: (neuron, d_model).

        A norm after the FFN is taken at a root mean square of 1. All neurons when None.
        """
        values = self.values(transformer)
        values = values if neurons is None else values[list(neurons)]
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if self.after is None and self.scale == 1.0:
            return values  # no copy where they are float32
        # Alternating signs have mean 0 and mean square 1, so that a norm leaves their size alone.
        like = values.new_ones(1, values.shape[1])
        like[:, 1::2] = -1
        return self.into_stream(transformer, like, values[None])[0]

    @torch.no_grad()
    def into_stream(self, transformer: Transformer, output: Tensor, parts: Tensor) -> Tensor:
        """What summands of the FFN's output become in the stream: (row, n, d_model), both times.

        All of the `output`, (row, d_model), sets the statistics of a norm after the FFN, so that
        the parts add up (`into_stream_bias` included).
        """
        if self.after is None:
            return parts * self.scale
        norm = transformer.model.get_submodule(self.after)
        gain, shift = norm_gain(norm, output, self.centres)  # float32 or wider, as squares need it
        fold = Fold(gain, self.centres)
        exact = norm(output).to(gain.dtype) - shift
        plain = fold.into_writer(output)
        # Fitted, not computed: each family has its own small number inside the square root.
        size = (plain * exact).sum(-1) / plain.square().sum(-1).clamp_min(1e-30)
        return fold.into_writer(parts) * size[:, None, None] * self.scale

    @torch.no_grad()
    def into_stream_bias(self, transformer: Transformer, output: Tensor) -> Tensor:
        """What a norm after the FFN adds whatever its input: (d_model,); usually 0."""
        if self.after is None:
            return torch.zeros_like(output[0])
        norm = transformer.model.get_submodule(self.after)
        return norm_gain(norm, output, self.centres)[1] * self.scale


def feed_forward(transformer: Transformer, block: int) -> FeedForward:
    """The neurons of block `block` (1 to n_layers), discovered and verified once."""
    return _FFNS.of(transformer, block)


def feed_forwards(transformer: Transformer) -> dict[int, FeedForward | str]:
    """The neurons of every block, or why it has none; one pass verifies them all."""
    return _FFNS.all(transformer)


def _search(transformer: Transformer, blocks: Sequence[int]) -> Find[FeedForward]:
    within = transformer.blocks[blocks[0] - 1] if len(blocks) == 1 else ""
    with transformer.itself():
        calls, _ = trace(transformer.model, probe(transformer.model, rows=2, seed=17), within)

    def find(block: int) -> FeedForward:
        with transformer.itself():
            return _find(transformer, block, calls)

    return find


_FFNS = ByBlock(_search)


def _find(transformer: Transformer, block: int, traced: Sequence[Call]) -> FeedForward:
    anatomy = transformer.known_anatomy(
        block, "its neurons are not known either; its layers can still be read and patched"
    )
    calls = calls_inside(transformer, block, traced)
    path = transformer.blocks[block - 1]
    output = last_call(calls, f"{path}.{anatomy.sites['ffn.out'].path}").gives
    for call in reversed(calls):  # the innermost matrix that gives the output ends last
        if has_matrix(call.module) and is_same(call.gives, output):
            if (down := matrix_of(call)) is None:
                raise ModelRefused(
                    f"law 'neurons' failed for block {block} of {transformer.identity.name}: "
                    f"coefficients times the weights of {call.path} do not give its output, as "
                    "with quantised weights, or with an adapter on them"
                )
            assert call.takes is not None
            site = Site(call.path.removeprefix(f"{path}."), "in")
            ffn = FeedForward(block, down, call.takes.shape[-1], site)
            return _with_norm(transformer, ffn, anatomy, call, calls)
    raise ModelRefused(
        f"no single matrix gives the output of the FFN of block {block} of "
        f"{transformer.identity.name}, as in a mixture of experts, so its neurons cannot be read "
        "or edited one by one"
    )


def _with_norm(
    transformer: Transformer, ffn: FeedForward, anatomy: Anatomy, call: Call, calls: list[Call]
) -> FeedForward:
    """The same neurons with what happens to their sum on its way to the stream, verified."""
    added = after_part(transformer.blocks[ffn.block - 1], anatomy, "ffn", call, calls)
    if added is None:
        return replace(ffn, scale=anatomy.scale)
    assert call.gives is not None
    assert added.gives is not None
    output = call.gives.reshape(-1, call.gives.shape[-1])
    exact = added.gives.reshape(output.shape).double() * anatomy.scale
    allowed = max(rounding(output), ROUNDING[torch.float32])  # many norms compute in float32
    for centres in (False, True):
        candidate = replace(ffn, after=added.path, centres=centres, scale=anatomy.scale)
        parts = candidate.into_stream(transformer, output, output[:, None])[:, 0]
        total = parts.double() + candidate.into_stream_bias(transformer, output).double()
        if row_gap(total, exact) <= allowed:
            return candidate
    raise ModelRefused(
        f"law 'neurons' failed for block {ffn.block} of {transformer.identity.name}: {added.path} "
        "is not linear for given statistics, so the FFN's output cannot be split into neurons"
    )
