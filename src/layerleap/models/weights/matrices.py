"""Weight matrices found in a recorded pass.

In: the calls of one block in a trace. Out: `Rows`: some rows of one weight matrix, each the weights
from all inputs to one output, whatever the class of the module (`nn.Linear`, `Conv1D`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from layerleap.errors import ModelRefused
from layerleap.models.changes import plain_tensors
from layerleap.models.discovery.compare import is_same, rounding, row_gap
from layerleap.models.discovery.sites import Anatomy, is_norm
from layerleap.models.discovery.trace import Call
from layerleap.models.transformer import Transformer


@dataclass(frozen=True)
class Rows:
    """Rows of the matrix of one module: one per output, or those in `chosen`."""

    path: str
    is_transposed: bool  # the weight has a column per output, as in `Conv1D`
    chosen: tuple[int, ...] | None = None  # outputs of the module; all when None

    def of(self, transformer: Transformer) -> Tensor:
        """(output, input), a view of the weights unless rows are chosen."""
        weight = transformer.model.get_submodule(self.path).weight
        assert isinstance(weight, Tensor)
        return self.pick(weight.detach())

    def pick(self, weight: Tensor) -> Tensor:
        """The rows of a tensor like the module's weight, such as its change: (output, input)."""
        rows = weight.T if self.is_transposed else weight
        return rows if self.chosen is None else rows[list(self.chosen)]

    def bias(self, transformer: Transformer) -> Tensor | None:
        """(output,), or None."""
        bias = getattr(transformer.model.get_submodule(self.path), "bias", None)
        if not isinstance(bias, Tensor):
            return None
        return bias.detach() if self.chosen is None else bias.detach()[list(self.chosen)]


def calls_inside(transformer: Transformer, block: int, traced: Sequence[Call]) -> list[Call]:
    """The calls inside one block, in order of their end; a shared block runs once per layer."""
    path = transformer.blocks[block - 1]
    runs = [call for call in traced if call.path == path]
    run = runs[transformer.blocks[: block - 1].count(path)]
    return sorted((call for call in traced if run.contains(call)), key=lambda call: call.end)


def last_call(calls: list[Call], path: str) -> Call:
    """The last of the calls of one module."""
    return [call for call in calls if call.path == path][-1]


def has_matrix(module: nn.Module) -> bool:
    """True if the module has one weight matrix of its own."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


def matrix_of(call: Call) -> Rows | None:
    """The matrix behind a call, if it explains what the call gave; None otherwise."""
    if not has_matrix(call.module):
        return None
    if call.takes is None or call.gives is None or not call.takes.is_floating_point():
        return None
    weight, bias = call.module.weight, getattr(call.module, "bias", None)
    assert isinstance(weight, Tensor)
    _check_in_memory(call, weight)
    shift = bias.detach().double() if isinstance(bias, Tensor) else 0.0
    for is_transposed in (False, True):
        rows = weight.detach().T if is_transposed else weight.detach()
        if rows.shape != (call.gives.shape[-1], call.takes.shape[-1]):
            continue
        product = call.takes.double() @ rows.double().T + shift
        if row_gap(product, call.gives) <= rounding(call.gives):
            return Rows(call.path, is_transposed)
    return None


def _check_in_memory(call: Call, weight: Tensor) -> None:
    """Refuse weights that are offloaded, or kept as something other than numbers in a matrix."""
    if next(plain_tensors(weight)) is not weight:
        raise ModelRefused(
            f"the weights of {call.path} are quantised ({type(weight).__name__}), so they "
            "cannot be read as a matrix; load the model without quantisation for its neurons and "
            "heads"
        )
    if weight.is_meta:
        raise ModelRefused(
            f"the weights of {call.path} are offloaded, so they cannot be verified; load the model "
            "into memory"
        )


def after_part(
    path: str, anatomy: Anatomy, part: str, call: Call, calls: list[Call]
) -> Call | None:
    """The call of a norm or scale between a part's last matrix and the stream; None without one.

    A post-norm is none: it takes the whole stream, not what the part adds to it.
    """
    if anatomy.style == "post-norm":
        return None
    added = last_call(calls, f"{path}.{anatomy.adds[anatomy.parts.index(part)].path}")
    if is_same(added.gives, call.gives):
        return None
    if not is_same(added.takes, call.gives):
        law = {"attn": "heads", "ffn": "neurons"}[part]
        raise ModelRefused(f"law {law!r} failed: {added.path} does not take what {call.path} gives")
    return added


def norm_before(call: Call, calls: list[Call]) -> str | None:
    """The path of the norm whose output a call takes; None if it takes the stream itself."""
    norms = (other for other in calls if is_norm(other.module))
    return next((norm.path for norm in norms if is_same(norm.gives, call.takes)), None)
