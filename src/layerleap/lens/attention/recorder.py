"""Attention patterns of a pass, whatever implementation the model runs with.

In: a wrapped model, and a pass over one input. Out: `Patterns` of each block: which share of its
attention every head pays to every position, and the values that it takes there.

What enters the model's own attention function (queries and keys after rotation and norms, masks,
scaling, soft-cap, biases and sinks) is seen on its way, and the softmax is computed beside it. What
the function returns must be these weights times the values, or the model is refused by name. A
family that does not go through transformers' attention interface is asked for its weights in a
second pass, and its values are those of its verified heads.
"""

import inspect
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
from layerleap.models.hooks.attention import attention_wrapped_by
from layerleap.models.transformer import Transformer
from layerleap.models.weights import Heads, heads

BUDGET = 2**28  # numbers of all patterns together: 1 GB in float32
_scaled = nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, eq=False)
class Patterns:
    """The attention of one block to one input, on the CPU in float32 or wider."""

    weights: Tensor  # (head, query, key); a row sums to 1, or to 1 less the share of a sink
    values: Tensor  # (head, key, d_value); grouped heads share theirs
    sink: Tensor | None = None  # (head, query), the share that no position gets


class PatternRecorder:
    """Goes around attention functions and keeps the patterns of one input."""

    def __init__(
        self, transformer: Transformer, given: OneInput, query: int | None, blocks: Sequence[int]
    ) -> None:
        """`query` is the only position to look from; all when None."""
        self.transformer, self.given = transformer, given
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
        mask: Any,
        *args: Any,
        **options: Any,
    ) -> tuple[Any, Any]:
        """As `function`; queries, keys and values are (row, head, pos, width)."""
        output, more = function(module, query, key, value, mask, *args, **options)
        if module not in self._modules:
            return output, more
        pattern = _pattern(self._queries, function, module, query, key, value, mask, options)
        self._require(pattern, output[0, self._queries])
        self._runs.setdefault(module, []).append(pattern)
        return output, more

    def _require(self, pattern: Patterns, given: Tensor) -> None:
        """Law 'patterns': weights times values are what attention gives, (query, head, d_value)."""
        mixed = (pattern.weights @ pattern.values).transpose(0, 1).flatten(1)
        # Many families compute the softmax in float32, whatever the model's dtype.
        allowed = max(rounding(given), ROUNDING[torch.float32])
        if row_gap(mixed, given.reshape(mixed.shape).cpu()) > 10 * allowed:
            raise ModelRefused(
                f"law 'patterns' failed for {self.transformer.identity.name}: softmax of its "
                "scores times values is not what its attention gives, as where an edit replaces "
                "attention, or a family adds to scores what is not known here"
            )

    def of_blocks(self, blocks: Sequence[int]) -> dict[int, Patterns]:
        """The patterns of self-attention of some blocks."""
        found = {block: one for block in blocks if (one := self._of(block))}
        missing = [block for block in blocks if block not in found]
        return found | (self._asked_for(missing) if missing else {})

    def _of(self, block: int) -> Patterns | None:
        transformer, path = self.transformer, self.transformer.blocks[block - 1]
        anatomy = transformer.anatomy[block - 1]
        inside = transformer.block(block)
        if not isinstance(anatomy, str):  # cross-attention has a root of its own
            inside = inside.get_submodule(attention_root(anatomy.sites["attn.out"].path) or "")
        runs = [one for module in inside.modules() for one in self._runs.get(module, ())]
        run = transformer.blocks[: block - 1].count(path)  # a shared block runs once per layer
        return runs[run] if run < len(runs) else None

    @torch.no_grad()
    def _asked_for(self, blocks: Sequence[int]) -> dict[int, Patterns]:
        """The patterns of families with attention functions of their own."""
        transformer, found = self.transformer, {}
        inputs = prepare(transformer.model, self.given.inputs)
        with _Watched() as watched:
            transformer.model(**inputs)
        if len(watched.calls) == transformer.n_layers:
            for block in blocks:
                query, key, value, mask, options, output = watched.calls[block - 1]
                module = transformer.block(block)
                own = _pattern(self._queries, _scaled, module, query, key, value, mask, options)
                self._require(own, output[0, :, self._queries].transpose(0, 1))
                found[block] = own
            return found
        output = transformer.model(**inputs, output_attentions=True)
        given = getattr(output, "attentions", None)
        if not given or len(given) != transformer.n_layers or given[0] is None:
            raise ModelRefused(
                f"attention of {transformer.identity.name} does not go through transformers' "
                "attention interface, and the model returns no weights, so there are no patterns"
            )
        sites: list[tuple[int, str | Site]] = []
        for block in blocks:
            sites += [
                (block, "attn.in"),
                (block, mixed_site(transformer, heads(transformer, block))),
            ]
        entered = transformer.capture(self.given.inputs, layers=(), sites=sites).sites
        for block in blocks:
            known = heads(transformer, block)
            bias = known.values.bias(transformer)
            made = entered[block, "attn.in"][0] @ known.values.of(transformer).T
            made = (made if bias is None else made + bias).unflatten(-1, (known.n_kv_heads, -1))
            weights = _plain(given[block - 1][0, :, self._queries])
            found[block] = Patterns(weights, _shared(_plain(made.transpose(0, 1)), known.n_heads))
            self._require(
                found[block], entered[block, mixed_site(transformer, known)][0, self._queries]
            )
        return found


class _Watched(TorchFunctionMode):
    """Sees what PyTorch's attention function is called with, on this thread."""

    NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the function; remember the call if it is attention."""
        output = function(*args, **(kwargs or {}))
        if function is _scaled:
            given = {**dict(zip(self.NAMES, args, strict=False)), **(kwargs or {})}
            options = {"scaling": given.get("scale"), "is_causal": given.get("is_causal", False)}
            triple = (given["query"], given["key"], given["value"])
            self.calls.append((*triple, given.get("attn_mask"), options, output))
        return output


def mixed_site(transformer: Transformer, known: Heads) -> Site:
    """What the output matrix of attention takes: the outputs of all heads, side by side."""
    path = transformer.blocks[known.block - 1]
    return Site(known.outputs.path.removeprefix(f"{path}."), "in")


@contextmanager
def patterns(
    transformer: Transformer,
    given: OneInput,
    query: int | None = None,
    blocks: Sequence[int] = (),
) -> Iterator[PatternRecorder]:
    """Record the patterns of some blocks in the pass that runs inside; of none if there are none.

    Args:
        transformer: the model.
        given: what it runs on.
        query: the only position to look from; all when None.
        blocks: 1 to n_layers.
    """
    numbers = BUDGET // max(1, len(blocks)) // max(1, len(given.tokens))
    n_heads = getattr(transformer.model.config.get_text_config(), "num_attention_heads", None) or 1
    if query is None and len(given.tokens) * n_heads > numbers:
        raise BadSettings(
            f"patterns of {len(blocks)} blocks over {len(given.tokens)} tokens are more than fit "
            "in 1 GB; name a block, or give a shorter text"
        )
    recorder = PatternRecorder(transformer, given, query, blocks)
    with attention_wrapped_by(recorder) if blocks else nullcontext():
        yield recorder


def _plain(value: Tensor) -> Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32)).cpu()


def _shared(values: Tensor, n_heads: int) -> Tensor:
    """(kv head, ...) -> (head, ...): each group of heads shares one."""
    return values.repeat_interleave(n_heads // len(values), 0)


def _pattern(
    queries: slice,
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    options: dict[str, Any],
) -> Patterns:
    """The weights that an attention function uses, from what it is called with."""
    n_heads, n_queries, n_keys = query.shape[1], query.shape[2], key.shape[2]
    q, k, v = (_plain(one[0]) for one in (query[:, :, queries], key, value))
    scale = options.get("scaling")
    scores = q @ _shared(k, n_heads).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    cap = options.get("softcap")
    if cap is not None and "softcap" in inspect.signature(function).parameters:
        scores = cap * torch.tanh(scores / cap)
    if (bias := options.get("position_bias")) is not None:
        scores = scores + _plain(bias[0, :, queries])
    if isinstance(mask, Tensor) and mask.dim() == 4:
        own = mask[0, :, queries, :n_keys].cpu()
        hidden = ~own if own.dtype == torch.bool else own <= torch.finfo(own.dtype).min / 2
        scores = scores if own.dtype == torch.bool else scores + own.to(scores)
        scores = scores.masked_fill(hidden, -torch.inf)
    elif mask is not None:
        raise ModelRefused(
            f"{type(module).__name__} is given a {type(mask).__name__} as its mask, which cannot "
            "be read; load the model with attn_implementation='sdpa' or 'eager'"
        )
    else:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if causal and n_queries > 1:
            later = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(1 + n_keys - n_queries)
            scores = scores.masked_fill(later[queries], -torch.inf)
    sinks = options.get("s_aux")
    if sinks is None:
        return Patterns(scores.softmax(-1), _shared(v, n_heads))
    column = _plain(sinks)[:, None, None].expand(-1, scores.shape[1], 1)
    both = torch.cat([scores, column], -1).softmax(-1)
    return Patterns(both[..., :-1], _shared(v, n_heads), both[..., -1])
