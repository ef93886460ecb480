"""What was learned, read in the vocabulary.

In: a delta, a block and a kind of vectors. Out: `Direction`s: the change of one matrix, taken apart
into its strongest directions, each as the tokens that it now reads or writes.

    change of W = sum over i of size_i * u_i v_i^T        v_i: a direction of the stream

The sign of a direction is arbitrary, so both of its ends are shown. For values, the direction that
W_O makes of u_i is shown too: what an attended token with v_i now writes, added up over the heads
that share it, each with the same attention. Norms are left out.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from layerleap.act.learning.delta import Delta
from layerleap.act.learning.parameters import rows_of
from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused, check_choice
from layerleap.lens.vocabulary.weights import VectorReading, weights
from layerleap.models.facts import KINDS
from layerleap.models.hooks.capture import check_block
from layerleap.models.transformer import Transformer
from layerleap.models.weights import Heads, feed_forward, ffn_keys, heads
from layerleap.models.weights.matrices import Rows

ATTENTION = {"attn.q": "queries", "attn.k": "keys", "attn.v": "values", "attn.o": "outputs"}


@dataclass(frozen=True)
class Direction:
    """One direction of the change of a matrix."""

    block: int
    kind: str  # attn.k, ffn.value, ...
    size: float  # singular value
    share: float  # of the squared change of the matrix
    vectors: tuple[VectorReading, ...]  # what it reads or writes; for values, first one, then other

    def __repr__(self) -> str:
        parts = (
            f"{one.words[0]} {' '.join(s.token.label for s in one.promotes[:3])}; "
            f"{one.words[1]} {' '.join(s.token.label for s in one.suppresses[:3])}"
            for one in self.vectors
        )
        return f"Direction(L{self.block} {self.kind}, {self.share:.0%}: {' -> '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@checked
@torch.no_grad()
def read_delta(
    transformer: Transformer,
    delta: Delta,
    block: int,
    kind: str = "attn.v",
    *,
    directions: int = 3,
    top: int = 10,
) -> list[Direction]:
    """The strongest directions of the change of one matrix, strongest first.

    Args:
        block: 1 to n_layers.
        kind: of vectors: attn.q, attn.k, attn.v, attn.o, ffn.key, ffn.gate, ffn.up or ffn.value.
        directions: how many at most; fewer if the change has not as many.
        top: tokens per end.
    """
    delta.check_model(transformer)
    check_block(transformer, block)
    check_choice(kind, KINDS, "kind")
    if directions < 1 or top < 1:
        raise BadSettings(f"directions is {directions} and top {top}; expected 1 or more of both")
    change = _change(transformer, delta, block, kind).double().cpu()
    u, sizes, v = torch.linalg.svd(change, full_matrices=False)
    total, reader = float(sizes.square().sum()), weights(transformer)
    readings = []
    for number in range(min(directions, int((sizes > 1e-6 * sizes[0]).sum()))):
        direction = v[number][None].to(transformer.device(transformer.n_layers), torch.float32)
        vectors = [reader.reading(kind, direction, top)]
        if kind == "attn.v":
            written = _written(transformer, heads(transformer, block), u[:, number])
            vectors.append(reader.reading("attn.o", written, top))
        size = float(sizes[number])
        readings.append(Direction(block, kind, size, size**2 / total, tuple(vectors)))
    return readings


def _change(transformer: Transformer, delta: Delta, block: int, kind: str) -> Tensor:
    """The change of the vectors of one kind: (n, d_model)."""
    rows = _rows(transformer, block, kind)
    picked = rows.pick(_tensor(delta, rows.path, block, kind))
    return picked.T if kind in ("ffn.value", "attn.o") else picked


def _rows(transformer: Transformer, block: int, kind: str) -> Rows:
    if kind == "ffn.value":
        return feed_forward(transformer, block).down
    if kind.startswith("ffn."):
        keys = ffn_keys(transformer, block)
        if kind not in keys.rows:
            raise ModelRefused(
                f"the FFN of block {block} has no {kind}; it has {' and '.join(keys.rows)}"
            )
        return keys.rows[kind]
    return rows_of(heads(transformer, block), ATTENTION[kind])


def _tensor(delta: Delta, path: str, block: int, kind: str) -> Tensor:
    name = f"{path}.weight"
    if name not in delta.tensors:
        raise BadSettings(
            f"this delta does not change {kind} of block {block} ({name}); it changes "
            f"{', '.join(list(delta.tensors)[:3])}, ..."
        )
    return delta.tensors[name]


def _written(transformer: Transformer, heads: Heads, values: Tensor) -> Tensor:
    """What W_O makes of a direction of all value heads: (1, d_model)."""
    by_head = values.reshape(heads.n_kv_heads, heads.d_value)
    written = sum(
        by_head[heads.kv_head(head)] @ heads.output(transformer, head).double().cpu()
        for head in range(heads.n_heads)
    )
    assert isinstance(written, Tensor)
    return written[None].to(transformer.device(transformer.n_layers), torch.float32)
