"""Attention patterns of a pass, whatever implementation the model runs with.

In: a wrapped model, and a pass over one input. Out: `Patterns` of each block: which share of its
attention every head pays to every position, and the values that it takes there.

The model's own attention function is called a second time with the identity in place of the values:
weights times identity are the weights, after its masks, windows, soft-caps, biases and sinks.
Weights times values must then be what attention gives. Families that do not go through
transformers' attention interface run once more: PyTorch's attention function is called twice in the
same way, or, if there is none, the model is asked for its weights. (Asking comes last: Falcon, if
it runs with sdpa, returns weights that it does not use.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.attribution.prompt import OneInput
from layerleap.models.discovery.compare import ROUNDING, rounding, row_gap
from layerleap.models.discovery.probe import prepare
from layerleap.models.discovery.sites import Site, attention_root
from layerleap.models.hooks.attention import attention_wrapped_by, unit_values
from layerleap.models.transformer import Transformer
from layerleap.models.weights import Heads, heads

BUDGET = 2**28  # numbers of all patterns together: 1 GB in float32
_SDPA = nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, eq=False)
class Patterns:
    """The attention of one block to one input, on the CPU in float32 or wider."""

    weights: Tensor  # (head, query, key); a row sums to 1, or to 1 less the share of a sink
    values: Tensor  # (head, key, d_value); grouped heads share theirs

    @classmethod
    def of(cls, name: str, weights: Tensor, values: Tensor, given: Tensor) -> "Patterns":
        """Verified patterns; values are (kv head, key, d_value), `given` (query, head, d_value)."""
        weights, values = (
            one.detach().to(torch.promote_types(one.dtype, torch.float32)).cpu()
            for one in (weights, values)
        )
        values = values.repeat_interleave(len(weights) // len(values), 0)
        mixed = (weights @ values).transpose(0, 1).flatten(1)
        # Many families compute the softmax in float32, whatever the model's dtype.
        allowed = 10 * max(rounding(given), ROUNDING[torch.float32])
        if row_gap(mixed, given.reshape(mixed.shape).cpu()) > allowed:
            raise ModelRefused(
                f"law 'patterns' failed for {name}: weights times values are not what its "
                "attention gives, so its weights cannot be shown"
            )
        return cls(weights, values)


class PatternRecorder:
    """Goes around attention functions and keeps the patterns of one input."""

    def __init__(
        self, transformer: Transformer, given: OneInput, query: int | None, blocks: Sequence[int]
    ) -> None:
        """`query` is the only position to look from; all when None."""
        self.transformer, self.given, self.blocks = transformer, given, blocks
        self._name = transformer.identity.name
        self._queries = slice(None) if query is None else slice(query, query + 1)
        self._modules = {m for block in blocks for m in transformer.block(block).modules()}
        self._runs: dict[nn.Module, list[Patterns]] = {}

    @torch.no_grad()
    def __call__(
        self,
        function: Callable[..., tuple[Any, Any]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[Any, Any]:
        """As `function`; queries, keys and values are (row, head, pos, width)."""
        output, more = function(module, query, key, value, *args, **options)
        if module in self._modules:
            weights, _ = function(module, query, key, unit_values(value), *args, **options)
            rows = weights[0, self._queries].transpose(0, 1)
            pattern = Patterns.of(self._name, rows, value[0], output[0, self._queries])
            self._runs.setdefault(module, []).append(pattern)
        return output, more

    def found(self) -> dict[int, Patterns]:
        """The patterns of self-attention, by block."""
        by_block = {block: one for block in self.blocks if (one := self._of(block))}
        if len(by_block) < len(self.blocks):
            by_block = self._watched() or self._asked_for()
        return by_block

    def _of(self, block: int) -> Patterns | None:
        anatomy, inside = self.transformer.anatomy[block - 1], self.transformer.block(block)
        if not isinstance(anatomy, str):  # cross-attention has a root of its own
            inside = inside.get_submodule(attention_root(anatomy.sites["attn.out"].path) or "")
        runs = [one for module in inside.modules() for one in self._runs.get(module, ())]
        paths = self.transformer.blocks[:block]
        run = paths[:-1].count(paths[-1])  # a shared block runs once per layer
        return runs[run] if run < len(runs) else None

    @torch.no_grad()
    def _watched(self) -> dict[int, Patterns]:
        with _Watched() as watched:
            self.transformer.model(**prepare(self.transformer.model, self.given.inputs))
        if len(watched.calls) != self.transformer.n_layers:
            return {}
        by_block = {}
        for block in self.blocks:
            weights, value, output = watched.calls[block - 1]
            rows = output[0, :, self._queries].transpose(0, 1)
            by_block[block] = Patterns.of(self._name, weights[0, :, self._queries], value[0], rows)
        return by_block

    @torch.no_grad()
    def _asked_for(self) -> dict[int, Patterns]:
        transformer, by_block = self.transformer, {}
        inputs = prepare(transformer.model, self.given.inputs)
        given = getattr(transformer.model(**inputs, output_attentions=True), "attentions", None)
        if not given or len(given) != transformer.n_layers or given[0] is None:
            raise ModelRefused(
                f"attention of {self._name} does not go through transformers' attention interface, "
                "and the model returns no weights, so there are no patterns"
            )
        for block in self.blocks:
            known = heads(transformer, block)
            bias, mixed = known.values.bias(transformer), mixed_site(transformer, known)
            sites = transformer.capture(
                inputs, layers=(), sites=[(block, "attn.in"), (block, mixed)]
            ).sites
            made = sites[block, "attn.in"][0] @ known.values.of(transformer).T
            made = made if bias is None else made + bias
            value = made.unflatten(-1, (known.n_kv_heads, -1)).transpose(0, 1)
            weights = given[block - 1][0, :, self._queries]
            rows = sites[block, mixed][0, self._queries]
            by_block[block] = Patterns.of(self._name, weights, value, rows)
        return by_block


class _Watched(TorchFunctionMode):
    """Calls PyTorch's attention function twice, on this thread: weights, values and output."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        output = function(*args, **options)
        if function is _SDPA and len(args) >= 3:
            query, key, value, *more = args
            weights = function(query, key, unit_values(value), *more, **options)
            self.calls.append((weights, value, output))
        return output


def mixed_site(transformer: Transformer, known: Heads) -> Site:
    """What the output matrix of attention takes: the outputs of all heads, side by side."""
    path = transformer.blocks[known.block - 1]
    return Site(known.outputs.path.removeprefix(f"{path}."), "in")


@contextmanager
def patterns(
    transformer: Transformer, given: OneInput, blocks: Sequence[int], query: int | None = None
) -> Iterator[PatternRecorder]:
    """Record the patterns of these blocks in the pass that runs inside; of one query, or all."""
    n = len(given.tokens) if blocks else 0
    n_heads = getattr(transformer.model.config.get_text_config(), "num_attention_heads", 1)
    if n * n * n_heads * (len(blocks) if query is None else 1) > BUDGET:
        raise BadSettings(
            f"patterns of {len(blocks)} blocks over {n} tokens are more than fit in 1 GB; name a "
            "block, or give a shorter text"
        )
    recorder = PatternRecorder(transformer, given, query, blocks)
    with attention_wrapped_by(recorder) if blocks else nullcontext():
        yield recorder
