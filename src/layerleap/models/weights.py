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
        exact = norm(output) - shift
        plain = self._centred(output) * gain
        # Fitted, not computed: each family has its own small number inside the square root.
        size = (plain * exact).sum(-1) / plain.square().sum(-1).clamp_min(1e-30)
        return self._centred(parts) * gain * size[:, None, None] * self.scale

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
    shift = norm(torch.zeros_like(signs))
    plain = signs - signs.mean(-1, keepdim=True) if centres else signs
    return ((norm(signs) - shift) / plain)[0], shift[0]


_FFNS: "WeakKeyDictionary[Transformer, dict[int, FeedForward | ModelRefused]]" = WeakKeyDictionary()


def feed_forward(transformer: Transformer, block: int) -> FeedForward:
    """The neurons of block `block` (1 to n_layers), discovered and verified once."""
    check_block(transformer, block)
    known = _FFNS.setdefault(transformer, {})
    if block not in known:
        _discover(transformer, [block], within=transformer.blocks[block - 1])
    ffn = known[block]
    if isinstance(ffn, ModelRefused):
        raise ffn.with_traceback(None)
    return ffn


def feed_forwards(transformer: Transformer) -> dict[int, "FeedForward | ModelRefused"]:
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
                _FFNS[transformer][block] = error


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


def unembedding(transformer: Transformer) -> Tensor:
    """The matrix that makes the logits of a state that is already normed: (d_vocab, d_model).

    A view of the weights where one matrix does it; a product where a projection comes before it
    (OPT 350m).
    """
    modules = [
        transformer.model.get_submodule(step.path)
        for step in transformer.tail
        if step.kind == "module"
    ]
    if modules and transformer.model.get_output_embeddings() in modules[-1].modules():
        modules[-1] = transformer.model.get_output_embeddings()  # inside a larger head (BERT)
    weights = [getattr(module, "weight", None) for module in modules]
    matrices = [w for w in weights if isinstance(w, Tensor) and w.dim() == 2]
    head = matrices[-1].detach() if matrices else None
    if head is None or head.is_meta or not head.is_floating_point():
        raise ModelRefused(
            f"the logits of {transformer.identity.name} are not made by a matrix in memory "
            "(offloaded or quantised weights), so vectors cannot be read in its vocabulary"
        )
    if transformer.kind.endswith("-class") and len(matrices) > 1:
        raise ModelRefused(
            f"the head of {transformer.identity.name} has a hidden layer, so single vectors cannot "
            "be read as classes"
        )
    if head.shape[1] != transformer.d_model:
        if len(matrices) < 2 or matrices[-2].shape != (head.shape[1], transformer.d_model):
            raise ModelRefused(
                f"the output matrix of {transformer.identity.name} takes {head.shape[1]} numbers "
                f"and states have {transformer.d_model}, so vectors cannot be read in its "
                "vocabulary"
            )
        head = head @ matrices[-2].detach()
    return head
