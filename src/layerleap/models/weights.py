"""A verified view of a model's weights: the neurons of its FFNs, and its output matrix.

In: a wrapped model and a block. Out: `FeedForward`: where the coefficients of the neurons enter the
down-projection, and the value vector of each neuron; or `ModelRefused` with the reason. And
`unembedding`: the matrix that makes logits, for reading vectors in the vocabulary.

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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.discovery.compare import ROUNDING, is_same, rounding, row_gap
from layerleap.models.discovery.probe import probe
from layerleap.models.discovery.sites import Anatomy, Site
from layerleap.models.discovery.trace import Call, trace
from layerleap.models.hooks.capture import check_block
from layerleap.models.hooks.edit import unedited
from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class FeedForward:
    """The neurons of one block."""

    block: int  # 1 to n_layers
    path: str  # of the down-projection; what it takes are the coefficients
    n_neurons: int
    is_transposed: bool  # the weight has a column per neuron, as in `nn.Linear`
    site: Site  # what the down-projection takes, for `capture`
    after: str | None = None  # path of a norm or learned scale on the way to the stream
    centres: bool = False  # that norm subtracts the mean, as LayerNorm does
    scale: float = 1.0  # of everything that the block adds to the stream

    def module(self, transformer: Transformer) -> nn.Module:
        """The down-projection."""
        return transformer.model.get_submodule(self.path)

    def values(self, transformer: Transformer) -> Tensor:
        """The value vectors: (n_neurons, d_model), a view of the weights."""
        weight = self.module(transformer).weight
        assert isinstance(weight, Tensor)
        return weight.detach().T if self.is_transposed else weight.detach()

    def bias(self, transformer: Transformer) -> Tensor | None:
        """What the FFN adds whatever its input: (d_model,)."""
        bias = getattr(self.module(transformer), "bias", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    @torch.no_grad()
    def into_stream(self, transformer: Transformer, output: Tensor, parts: Tensor) -> Tensor:
        """What parts of the FFN's output become in the stream: (row, n, d_model).

        Args:
            output: all of the FFN's output at each row, (row, d_model). It sets the statistics of a
                norm after the FFN, so that the parts add up (`into_stream_bias` included).
            parts: summands of it, (row, n, d_model).
        """
        if self.after is None:
            return parts * self.scale
        norm = transformer.model.get_submodule(self.after)
        gain, shift = _gain(norm, output, self.centres)
        # At least float32: squares of a float16 stream overflow.
        wide = torch.promote_types(output.dtype, torch.float32)
        exact = norm(output).to(wide) - shift
        plain = self._centred(output.to(wide)) * gain
        # Fitted, not computed: each family has its own small number inside the square root.
        size = (plain * exact).sum(-1) / plain.square().sum(-1).clamp_min(1e-30)
        return self._centred(parts.to(wide)) * gain * size[:, None, None] * self.scale

    @torch.no_grad()
    def into_stream_bias(self, transformer: Transformer, output: Tensor) -> Tensor:
        """What a norm after the FFN adds whatever its input: (d_model,); usually 0."""
        if self.after is None:
            return torch.zeros_like(output[0])
        norm = transformer.model.get_submodule(self.after)
        return _gain(norm, output, self.centres)[1] * self.scale

    def _centred(self, value: Tensor) -> Tensor:
        return value - value.mean(-1, keepdim=True) if self.centres else value


def _gain(norm: nn.Module, like: Tensor, centres: bool) -> tuple[Tensor, Tensor]:
    """The factor of each coordinate (up to a common one) and the shift of a norm or scale."""
    signs = torch.ones_like(like[:1])
    signs[:, 1::2] = -1
    wide = torch.promote_types(like.dtype, torch.float32)
    shift, given = (norm(x).to(wide) for x in (torch.zeros_like(signs), signs))
    plain = (signs - signs.mean(-1, keepdim=True) if centres else signs).to(wide)
    return ((given - shift) / plain)[0], shift[0]


_FFNS: "WeakKeyDictionary[Transformer, dict[int, FeedForward | str]]" = WeakKeyDictionary()


def feed_forward(transformer: Transformer, block: int) -> FeedForward:
    """The neurons of block `block` (1 to n_layers), discovered and verified once."""
    check_block(transformer, block)
    known = _FFNS.setdefault(transformer, {})
    if block not in known:
        _discover(transformer, [block], within=transformer.blocks[block - 1])
    ffn = known[block]
    if isinstance(ffn, str):
        raise ModelRefused(ffn)
    return ffn


def feed_forwards(transformer: Transformer) -> dict[int, FeedForward | str]:
    """The neurons of every block, or why it has none; one pass verifies them all."""
    known = _FFNS.setdefault(transformer, {})
    blocks = range(1, transformer.n_layers + 1)
    if missing := [block for block in blocks if block not in known]:
        _discover(transformer, missing)
    return {block: known[block] for block in blocks}


def _discover(transformer: Transformer, blocks: Sequence[int], within: str = "") -> None:
    with unedited(transformer.model):
        inputs = probe(transformer.model, rows=2, seed=17)
        calls, _ = trace(transformer.model, inputs, within=within)
        for block in blocks:
            try:
                _FFNS[transformer][block] = _find(transformer, block, calls)
            except ModelRefused as error:
                # Not the error: its traceback would keep the model alive.
                _FFNS[transformer][block] = str(error)


def _find(transformer: Transformer, block: int, traced: Sequence[Call]) -> FeedForward:
    anatomy = transformer.known_anatomy(
        block, "its neurons are not known either; its layers can still be read and patched"
    )
    calls = _calls(transformer, block, traced)
    path = transformer.blocks[block - 1]
    output = _last(calls, f"{path}.{anatomy.sites['ffn.out'].path}").gives
    for call in reversed(calls):  # the innermost matrix that gives the output ends last
        weight = getattr(call.module, "weight", None)
        is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
        if is_matrix and is_same(call.gives, output):
            site = Site(call.path.removeprefix(f"{path}."), "in")
            ffn = _verified(transformer, block, call, site)
            return _with_norm(transformer, ffn, anatomy, call, calls)
    raise ModelRefused(
        f"no single matrix gives the output of the FFN of block {block} of "
        f"{transformer.identity.name}, as in a mixture of experts, so its neurons cannot be read "
        "or edited one by one"
    )


def _calls(transformer: Transformer, block: int, traced: Sequence[Call]) -> list[Call]:
    """The calls inside one block, in order of their end; a shared block runs once per layer."""
    path = transformer.blocks[block - 1]
    run = [call for call in traced if call.path == path][
        transformer.blocks[: block - 1].count(path)
    ]
    return sorted((call for call in traced if run.contains(call)), key=lambda call: call.end)


def _last(calls: list[Call], path: str) -> Call:
    return [call for call in calls if call.path == path][-1]


def _verified(transformer: Transformer, block: int, call: Call, site: Site) -> FeedForward:
    """The neurons behind a down-projection, if coefficients times values give its output."""
    assert call.takes is not None
    assert call.gives is not None
    n, width = call.takes.shape[-1], call.gives.shape[-1]
    weight, bias = call.module.weight, getattr(call.module, "bias", None)
    assert isinstance(weight, Tensor)
    if weight.is_meta:
        raise ModelRefused(
            f"the weights of {call.path} are offloaded, so its neurons cannot be verified; load "
            "the model into memory"
        )
    shift = bias.detach().double() if isinstance(bias, Tensor) else 0.0
    for is_transposed, shape in ((True, (width, n)), (False, (n, width))):
        if weight.shape != shape:
            continue
        ffn = FeedForward(block, call.path, n, is_transposed, site)
        total = call.takes.double() @ ffn.values(transformer).double() + shift
        if row_gap(total, call.gives) <= rounding(call.gives):
            return ffn
    raise ModelRefused(
        f"law 'neurons' failed for block {block} of {transformer.identity.name}: coefficients "
        f"times the weights of {call.path} do not give its output, as with quantised weights"
    )


def _with_norm(
    transformer: Transformer, ffn: FeedForward, anatomy: Anatomy, call: Call, calls: list[Call]
) -> FeedForward:
    """The same neurons with what happens to their sum on its way to the stream, verified."""
    if anatomy.style == "post-norm":
        return ffn  # the norm takes the whole stream, not what the FFN adds to it
    path = f"{transformer.blocks[ffn.block - 1]}.{anatomy.adds[anatomy.parts.index('ffn')].path}"
    added = _last(calls, path)
    if is_same(added.gives, call.gives):
        return replace(ffn, scale=anatomy.scale)
    if not is_same(added.takes, call.gives):
        raise ModelRefused(
            f"law 'neurons' failed: {added.path} does not take what the neurons add up to"
        )
    assert call.gives is not None
    assert added.gives is not None
    output = call.gives.reshape(-1, call.gives.shape[-1])
    exact = added.gives.reshape(output.shape).double() * anatomy.scale
    allowed = max(rounding(output), ROUNDING[torch.float32])  # many norms compute in float32
    for centres in (False, True):
        found = replace(ffn, after=path, centres=centres, scale=anatomy.scale)
        parts = found.into_stream(transformer, output, output[:, None])[:, 0]
        total = parts.double() + found.into_stream_bias(transformer, output).double()
        if row_gap(total, exact) <= allowed:
            return found
    raise ModelRefused(
        f"law 'neurons' failed for block {ffn.block} of {transformer.identity.name}: {path} is not "
        "linear for given statistics, so the FFN's output cannot be split into neurons"
    )


_HEADS: "WeakKeyDictionary[Transformer, Tensor]" = WeakKeyDictionary()


def unembedding(transformer: Transformer) -> Tensor:
    """The matrix that makes logits of states: (d_vocab, d_model).

    A view of the weights where one matrix does it. Where the head has several (OPT 350m, BERT), it
    is their product; activations and norms between them are left out.
    """
    if transformer not in _HEADS:
        matrices = _head_matrices(transformer)
        head = matrices.pop()
        while matrices:
            head = head @ matrices.pop()
        _HEADS[transformer] = head
    return _HEADS[transformer]


def _head_matrices(transformer: Transformer) -> list[Tensor]:
    """The matrices of the tail in order, each taking what the one before gives."""
    name, matrices = transformer.identity.name, []
    for step in transformer.tail:
        if step.kind == "module":
            modules = transformer.model.get_submodule(step.path).modules()
            weights = [getattr(module, "weight", None) for module in modules]
            matrices += [w.detach() for w in weights if isinstance(w, Tensor) and w.dim() == 2]
    if not matrices or any(w.is_meta or not w.is_floating_point() for w in matrices):
        raise ModelRefused(
            f"the logits of {name} are not made by a matrix in memory (offloaded or quantised "
            "weights), so vectors cannot be read in its vocabulary"
        )
    widths = [transformer.d_model, *(len(matrix) for matrix in matrices)]
    if any(w.shape[1] != width for w, width in zip(matrices, widths, strict=False)):
        shapes = ", ".join(str(tuple(matrix.shape)) for matrix in matrices)
        raise ModelRefused(
            f"the matrices of the head of {name} ({shapes}) do not follow one another from "
            f"{transformer.d_model} numbers to logits, so vectors cannot be read in its vocabulary"
        )
    return matrices
