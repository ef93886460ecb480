"""The heads of a model's attention, verified: W_Q, W_K, W_V and W_O of each.

In: a wrapped model and a block. Out: `Heads`, or `ModelRefused` with the reason.

    output of attention = sum over heads of  attention weights @ x W_V W_O  + bias
    score of two tokens = x W_Q R W_K^T x'      R: the rotation by their offset; 1 at offset 0

A text of one token attends to itself alone, so what enters the output matrix is x W_V: that shows
which matrix, and which part of a fused one, belongs to which head. Queries and keys are compared
with those that transformers' attention interface is called with, at the first position, where no
rotation acts; then at the others, where the rotation of a query and of a key cancel each other.

With grouped heads, several query heads share one key and value head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.discovery.compare import is_same
from layerleap.models.discovery.probe import accepts, probe
from layerleap.models.discovery.sites import attention_root
from layerleap.models.discovery.trace import Call, trace
from layerleap.models.hooks.attention import attention_wrapped_by
from layerleap.models.transformer import Transformer
from layerleap.models.weights import projections
from layerleap.models.weights.by_block import ByBlock, Find
from layerleap.models.weights.matrices import (
    Rows,
    after_part,
    calls_inside,
    has_matrix,
    last_call,
    matrix_of,
    norm_before,
)
from layerleap.models.weights.norms import fold_of, fold_reader, fold_writer
from layerleap.models.weights.projections import Projection

Positions = Literal["rotary", "none"]  # rotary: scores depend on the offset of two tokens


@dataclass(frozen=True)
class Heads:
    """The attention heads of one block; heads count from 0."""

    block: int  # 1 to n_layers
    n_heads: int
    n_kv_heads: int
    d_head: int  # of queries and keys
    d_value: int
    positions: Positions
    values: Rows
    outputs: Rows
    queries: Projection | None  # None: not verified, see `qk_reason`
    keys: Projection | None
    norm: str | None  # path of the norm that attention reads through
    after: str | None = None  # path of a norm or scale between attention and the stream
    scale: float = 1.0  # of everything that the block adds to the stream
    qk_reason: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of vectors that are verified."""
        return ("attn.q", "attn.k", "attn.v", "attn.o") if self.queries else ("attn.v", "attn.o")

    @property
    def is_normed(self) -> bool:
        """True if queries or keys pass a norm; scores then lack a positive factor per token."""
        return any(part is not None and part.norm for part in (self.queries, self.keys))

    def kv_head(self, head: int) -> int:
        """The key and value head that serves a head."""
        return head // (self.n_heads // self.n_kv_heads)

    @torch.no_grad()
    def rows(self, transformer: Transformer, kind: str, *, fold: bool = False) -> Tensor:
        """The vectors of one kind, head after head: (head * width, d_model); see `vectors`."""
        if kind == "attn.o":
            rows = self.outputs.of(transformer).T
            if self.after is not None:
                norm = transformer.model.get_submodule(self.after)
                rows = fold_of(norm, rows[:1]).into_writer(rows)
            rows = rows if self.scale == 1.0 else rows * self.scale
            return fold_writer(transformer, rows) if fold else rows
        if kind == "attn.v":
            rows = self.values.of(transformer)
        else:
            projection = self.queries if kind == "attn.q" else self.keys
            if projection is None:
                raise ModelRefused(self.qk_reason)
            rows = projection.of(transformer)
        return fold_reader(transformer, self.norm, rows) if fold else rows

    def query(self, transformer: Transformer, head: int, *, fold: bool = False) -> Tensor:
        """W_Q of a head: (d_model, d_head)."""
        return self._rows_of(transformer, "attn.q", head, fold).T

    def key(self, transformer: Transformer, head: int, *, fold: bool = False) -> Tensor:
        """W_K that serves a head: (d_model, d_head)."""
        return self._rows_of(transformer, "attn.k", head, fold).T

    def value(self, transformer: Transformer, head: int, *, fold: bool = False) -> Tensor:
        """W_V that serves a head: (d_model, d_value)."""
        return self._rows_of(transformer, "attn.v", head, fold).T

    def output(self, transformer: Transformer, head: int, *, fold: bool = False) -> Tensor:
        """W_O of a head: (d_value, d_model)."""
        return self._rows_of(transformer, "attn.o", head, fold)

    def _rows_of(self, transformer: Transformer, kind: str, head: int, fold: bool) -> Tensor:
        if not 0 <= head < self.n_heads:
            raise BadSettings(
                f"block {self.block} has no head {head}; expected 0 to {self.n_heads - 1}"
            )
        width = self.d_head if kind in ("attn.q", "attn.k") else self.d_value
        place = head if kind in ("attn.q", "attn.o") else self.kv_head(head)
        return self.rows(transformer, kind, fold=fold)[place * width : (place + 1) * width]

    @torch.no_grad()
    def rotation(self, transformer: Transformer, offset: int) -> Tensor:
        """R in x W_Q R W_K^T x': (d_head, d_head), for a key `offset` positions before its query.

        It is measured on the model, not derived from its settings: queries of single tokens at
        position `offset` are compared with those before the rotation.
        """
        like = self.rows(transformer, "attn.q")
        eye = torch.eye(self.d_head, device=like.device, dtype=like.dtype)
        if self.positions == "none" or offset == 0:
            return eye
        if offset < 0:
            if transformer.kind == "next-token":
                raise BadSettings(
                    f"offset {offset}: a causal model does not attend to later tokens; expected 0 "
                    "or more"
                )
            return self.rotation(transformer, -offset).T
        wide = torch.promote_types(like.dtype, torch.float32)
        return _measured_rotation(transformer, self, offset).to(like.device, wide)


def heads(transformer: Transformer, block: int) -> Heads:
    """The heads of block `block` (1 to n_layers), discovered and verified once."""
    return _HEADS.of(transformer, block)


def all_heads(transformer: Transformer) -> dict[int, Heads | str]:
    """The heads of every block, or why they are not known; two passes verify them all."""
    return _HEADS.all(transformer)


@dataclass(frozen=True, eq=False)
class _Pass:
    """One recorded pass: its calls, and what the attention interface was called with."""

    calls: list[Call]
    attended: list[tuple[nn.Module, Tensor, Tensor]]  # module, queries, keys: (row, head, pos, d)

    def queries_and_keys(
        self, transformer: Transformer, block: int, root: str
    ) -> tuple[Tensor, Tensor] | None:
        """Those of the attention at `root` in a block; a shared block runs once per layer."""
        inside = set(transformer.model.get_submodule(root).modules())
        runs = [(query, key) for module, query, key in self.attended if module in inside]
        run = transformer.blocks[: block - 1].count(transformer.blocks[block - 1])
        return runs[run] if run < len(runs) else None


def _observe(transformer: Transformer, inputs: dict[str, Any], within: str) -> _Pass:
    attended: list[tuple[nn.Module, Tensor, Tensor]] = []

    def around(
        function: Any, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any
    ) -> tuple[Any, Any]:
        attended.append((module, query.detach().clone(), key.detach().clone()))
        out: tuple[Any, Any] = function(module, query, key, *args, **options)
        return out

    with transformer.itself(), attention_wrapped_by(around):
        calls, _ = trace(transformer.model, inputs, within=within)
    return _Pass(calls, attended)


def _search(transformer: Transformer, blocks: Sequence[int]) -> Find[Heads]:
    model = transformer.model
    if model.main_input_name == "pixel_values":
        return partial(_refuse_images, transformer)
    within = transformer.blocks[blocks[0] - 1] if len(blocks) == 1 else ""
    single = _observe(transformer, probe(model, rows=3, seed=29, n_tokens=1), within)
    several = _observe(transformer, probe(model, rows=2, seed=31), within)
    return lambda block: _find(transformer, block, single, several)


def _refuse_images(transformer: Transformer, block: int) -> Heads:
    raise ModelRefused(
        f"{transformer.identity.name} reads images, so no text of one token shows its heads"
    )


_HEADS = ByBlock(_search)


def _find(transformer: Transformer, block: int, single: _Pass, several: _Pass) -> Heads:
    name = transformer.identity.name
    anatomy = transformer.known_anatomy(block, "its heads are not known either")
    if "attn" not in anatomy.parts:
        raise ModelRefused(f"block {block} of {name} has no attention")
    path = transformer.blocks[block - 1]
    root = f"{path}.{attention_root(anatomy.sites['attn.out'].path)}"
    calls = calls_inside(transformer, block, single.calls)
    output = last_call(calls, f"{path}.{anatomy.sites['attn.out'].path}")
    last = next(
        (c for c in reversed(calls) if has_matrix(c.module) and is_same(c.gives, output.gives)),
        None,
    )
    outputs = None if last is None else matrix_of(last)
    if last is None or outputs is None or last.takes is None:
        raise ModelRefused(
            f"no single matrix gives the output of attention of block {block} of {name}, or it is "
            "quantised, so its heads cannot be told apart"
        )
    attended = single.queries_and_keys(transformer, block, root)
    n_heads = attended[0].shape[1] if attended else _configured_heads(transformer)
    mixed = last.takes.reshape(-1, last.takes.shape[-1])
    if not n_heads or mixed.shape[1] % n_heads:
        raise ModelRefused(
            f"{mixed.shape[1]} inputs of {last.path} of {name} do not split into {n_heads} heads"
        )
    before = [c for c in calls if c.end < last.start and c.path.startswith(root)]
    split = projections.find_values(before, mixed, n_heads)
    if split is None:
        raise ModelRefused(
            f"law 'heads' failed for block {block} of {name}: for a text of one token, no part of "
            f"a matrix inside {root} gives what enters {last.path}"
        )
    if (width := split.values.of(transformer).shape[1]) != transformer.d_model:
        raise ModelRefused(
            f"attention of block {block} of {name} does not read the stream alone: "
            f"{split.call.path} takes {width} numbers, expected {transformer.d_model}"
        )
    norm = None if anatomy.style == "post-norm" else norm_before(split.call, calls)
    after = after_part(path, anatomy, "attn", last, calls)
    attention = Heads(
        block,
        n_heads,
        split.n_kv_heads,
        d_head=split.width,
        d_value=split.width,
        positions="none",
        values=split.values,
        outputs=outputs,
        queries=None,
        keys=None,
        norm=norm,
        after=None if after is None else after.path,
        scale=anatomy.scale,
    )
    return _with_scores(transformer, attention, split, before, root, single, several)


def _configured_heads(transformer: Transformer) -> int:
    config: Any = transformer.model.config.get_text_config()
    names = ["num_attention_heads", "num_heads", "n_heads"]
    names = ["decoder_attention_heads", *names] if config.is_encoder_decoder else names
    return next((int(n) for name in names if (n := getattr(config, name, None))), 0)


def _with_scores(
    transformer: Transformer,
    attention: Heads,
    split: projections.Split,
    before: list[Call],
    root: str,
    single: _Pass,  # over texts of one token
    several: _Pass,
) -> Heads:
    """The same heads with queries and keys, if they can be verified; else with the reason."""
    name, block = transformer.identity.name, attention.block
    attended = single.queries_and_keys(transformer, block, root)
    later = several.queries_and_keys(transformer, block, root)
    if attended is None or later is None:
        reason = (
            f"attention of {name} does not go through transformers' attention interface, so its "
            "queries and keys cannot be verified"
        )
        return replace(attention, qk_reason=reason)
    queries = projections.find_projection(before, split.queries, attended[0])
    keys = projections.find_projection(before, split.keys, attended[1])
    if queries is None or keys is None:
        reason = (
            f"no matrix in block {block} of {name} gives the "
            f"{'queries' if queries is None else 'keys'} of its attention at the first position, "
            "with or without a norm"
        )
        return replace(attention, qk_reason=reason)
    calls = calls_inside(transformer, block, several.calls)
    x = last_call(calls, split.call.path).takes
    assert x is not None
    query, key = queries.apply(transformer, x), keys.apply(transformer, x)
    if not projections.agree_at_offset_0(query, key, *later):
        reason = (
            f"law 'heads' failed for block {block} of {name}: the scores of tokens with themselves "
            "are not those of its queries and keys"
        )
        return replace(attention, qk_reason=reason)
    positions: Positions = "none" if projections.is_close(query, later[0]) else "rotary"
    d_head = attended[0].shape[-1]
    return replace(attention, queries=queries, keys=keys, d_head=d_head, positions=positions)


def _measured_rotation(transformer: Transformer, attention: Heads, offset: int) -> Tensor:
    model, block = transformer.model, attention.block
    if not accepts(model, "position_ids"):
        raise ModelRefused(
            f"{transformer.identity.name} takes no position_ids, so its rotation at offset "
            f"{offset} cannot be measured; use offset 0"
        )
    assert attention.queries is not None
    rows = max(8, -(-4 * attention.d_head // attention.n_heads))
    inputs = probe(model, rows=rows, seed=37, n_tokens=1)
    inputs["position_ids"] = torch.full((rows, 1), offset, device=inputs["input_ids"].device)
    path = transformer.blocks[block - 1]
    try:
        turned = _observe(transformer, inputs, path)
    except IndexError as error:
        raise BadSettings(
            f"offset {offset} is beyond the positions of {transformer.identity.name}"
        ) from error
    anatomy = transformer.known_anatomy(block, "its heads are not known either")
    root = f"{path}.{attention_root(anatomy.sites['attn.out'].path)}"
    attended = turned.queries_and_keys(transformer, block, root)
    calls = calls_inside(transformer, block, turned.calls)
    x = last_call(calls, attention.queries.rows.path).takes
    assert attended is not None
    assert x is not None
    before = attention.queries.apply(transformer, x).reshape(-1, attention.d_head).double()
    after = attended[0].reshape(-1, attention.d_head)
    rotation = torch.linalg.lstsq(before, after.double()).solution
    if not projections.is_close(before @ rotation, after):
        raise ModelRefused(
            f"queries of block {block} of {transformer.identity.name} at position {offset} are not "
            "a rotation of those at position 0; use offset 0"
        )
    return rotation
