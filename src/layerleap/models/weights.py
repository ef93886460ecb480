"""A verified view of a model's weights: the neurons of its FFNs.

In: a wrapped model and a block. Out: `FeedForward`: where the coefficients of the neurons enter the
down-projection, and the value vector of each neuron; or `ModelRefused` with the reason.

    FFN output = sum over neurons of coefficient * value + bias

The down-projection is the matrix that gives the output of the FFN, whatever its class: `nn.Linear`,
`Conv1D`, with or without a gate in front. The equation is verified on a probe, when it is first
asked for, so that loading a model does not take longer. A mixture of experts has no such matrix.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.discovery.compare import is_same, rounding, row_gap
from layerleap.models.discovery.probe import probe
from layerleap.models.discovery.sites import Anatomy
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

    def module(self, transformer: Transformer) -> nn.Module:
        """The down-projection."""
        return transformer.model.get_submodule(self.path)

    def values(self, transformer: Transformer) -> Tensor:
        """The value vectors: (n_neurons, d_model), a view of the weights."""
        weight = self.module(transformer).weight
        assert isinstance(weight, Tensor)
        return weight.detach().T if self.is_transposed else weight.detach()


_FFNS: "WeakKeyDictionary[Transformer, dict[int, FeedForward]]" = WeakKeyDictionary()


def feed_forward(transformer: Transformer, block: int) -> FeedForward:
    """The neurons of block `block` (1 to n_layers), discovered and verified once."""
    check_block(transformer, block)
    known = _FFNS.setdefault(transformer, {})
    if block not in known:
        with unedited(transformer.model):
            known[block] = _find(transformer, block)
    return known[block]


def _find(transformer: Transformer, block: int) -> FeedForward:
    anatomy = transformer.known_anatomy(
        block, "its neurons are not known either; its layers can still be read and patched"
    )
    calls = _calls(transformer, block)
    path = transformer.blocks[block - 1]
    output = _last(calls, f"{path}.{anatomy.sites['ffn.out'].path}").gives
    for call in reversed(calls):  # the innermost matrix that gives the output ends last
        weight = getattr(call.module, "weight", None)
        is_matrix = isinstance(weight, Tensor) and weight.dim() == 2
        if is_matrix and is_same(call.gives, output):
            ffn = _verified(transformer, block, call)
            _check_norm(anatomy, call, calls, path)
            return ffn
    raise ModelRefused(
        f"no single matrix gives the output of the FFN of block {block} of "
        f"{transformer.identity.name}, as in a mixture of experts, so its neurons cannot be read "
        "or edited one by one"
    )


def _calls(transformer: Transformer, block: int) -> list[Call]:
    """The calls inside one block, in order of their end; a shared block runs once per layer."""
    path = transformer.blocks[block - 1]
    calls, _ = trace(transformer.model, probe(transformer.model, rows=2, seed=17), within=path)
    runs = [call for call in calls if call.path == path]
    run = runs[transformer.blocks[: block - 1].count(path)]
    return sorted((call for call in calls if run.contains(call)), key=lambda call: call.end)


def _last(calls: list[Call], path: str) -> Call:
    return [call for call in calls if call.path == path][-1]


def _verified(transformer: Transformer, block: int, call: Call) -> FeedForward:
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
        ffn = FeedForward(block, call.path, n, is_transposed)
        total = call.takes.double() @ ffn.values(transformer).double() + shift
        if row_gap(total, call.gives) <= rounding(call.gives):
            return ffn
    raise ModelRefused(
        f"law 'neurons' failed for block {block} of {transformer.identity.name}: coefficients "
        f"times the weights of {call.path} do not give its output, as with quantised weights"
    )


def _check_norm(anatomy: Anatomy, call: Call, calls: list[Call], path: str) -> None:
    """Where a norm follows the FFN (Gemma 2), it must take what the neurons add up to."""
    if anatomy.style == "post-norm" or "ffn_post.in" not in anatomy.sites:
        return
    norm = _last(calls, f"{path}.{anatomy.sites['ffn_post.in'].path}")
    if not is_same(norm.takes, call.gives):
        raise ModelRefused(
            f"law 'neurons' failed: {norm.path} does not take what the neurons add up to"
        )
