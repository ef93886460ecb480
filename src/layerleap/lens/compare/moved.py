"""The vectors and heads that moved most, and what their displacement says in the vocabulary.

In: the vectors of one kind in one block, before and after tuning; block after block.
Out: `HeadChange` and `NeuronChange`: only as many as are listed are ever kept.

A displacement is theta_tuned - theta_base; its tokens are those of the base's output matrix times
the displacement (arXiv 2209.02535, section 5), at unit length: scores of a vector that moved little
can then be compared with those of one that moved far. The displacement of a head is a matrix,
(d_head, d_model), which is read along the direction that holds most of it. A direction has no sign,
so the two ends of a head could be swapped; the stronger one comes first.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from layerleap.errors import BadSettings, ModelRefused
from layerleap.lens.compare.difference import HeadChange, NeuronChange, Words
from layerleap.lens.compare.pair import Place
from layerleap.lens.vocabulary.neurons import Scored, vector_ends
from layerleap.lens.vocabulary.settings import Inverse
from layerleap.models.transformer import Transformer
from layerleap.models.weights import dual, heads, unembedding


class _Candidate(NamedTuple):
    score: float  # that decides which moved most
    block: int
    number: int  # of the neuron or head
    is_shared: bool
    relative: float | None
    cosine: float | None
    displacement: Tensor  # (d_model,), or (d_head, d_model)


class Moved:
    """The vectors and heads that moved most so far, by kind."""

    def __init__(self, kinds: Iterable[str], top: int) -> None:
        self.top = top
        self.best: dict[str, list[_Candidate]] = {kind: [] for kind in kinds}

    def take(self, block: int, kind: str, where: Place, base: Tensor, tuned: Tensor) -> float:
        """Look at all vectors of one kind in a block; returns how far their matrix moved."""
        wide = torch.promote_types(base.dtype, torch.float32)
        start = base.to(wide)
        shift = tuned.to(wide) - start
        if kind.startswith("ffn."):
            self._take_neurons(block, kind, start, shift)
        else:
            self._take_heads(block, kind, where, start, shift)
        size = float(start.norm())
        return float(shift.norm()) / size if size else 0.0

    def _take_neurons(self, block: int, kind: str, start: Tensor, shift: Tensor) -> None:
        norms, sizes = shift.norm(dim=1), start.norm(dim=1)

        def candidate(row: int) -> _Candidate:
            norm, size = float(norms[row]), float(sizes[row])
            relative = norm / size if size else None
            cosine = None
            if size:  # float64: rounding would depend on the layout of the rows
                cosine = float(shift[row].double() @ start[row].double()) / (norm * size)
            return _Candidate(norm, block, row, False, relative, cosine, shift[row].float().clone())

        self._offer(kind, norms, candidate)

    def _take_heads(
        self, block: int, kind: str, where: Place, start: Tensor, shift: Tensor
    ) -> None:
        known = heads(*where)
        is_own = kind in ("attn.q", "attn.o")
        n_heads = known.n_heads if is_own else known.n_kv_heads
        is_shared = n_heads < known.n_heads
        parts = shift.reshape(n_heads, -1, shift.shape[1])
        sizes = start.reshape(n_heads, -1).norm(dim=1).clamp_min(torch.finfo(start.dtype).tiny)
        relatives = parts.flatten(1).norm(dim=1) / sizes

        def candidate(row: int) -> _Candidate:
            score = float(relatives[row])
            return _Candidate(score, block, row, is_shared, score, None, parts[row].float().clone())

        self._offer(kind, relatives, candidate)

    def _offer(self, kind: str, scores: Tensor, candidate: Callable[[int], _Candidate]) -> None:
        kept = self.best[kind]
        values, rows = scores.topk(min(self.top, len(scores)))
        for value, row in zip(values.tolist(), rows.tolist(), strict=True):
            if value > 0 and (len(kept) < self.top or value > kept[-1].score):
                kept.append(candidate(row))
                kept.sort(key=lambda one: (-one.score, one.block, one.number))
                del kept[self.top :]

    def read(
        self, reader: Transformer, tokens: int, inverse: Inverse
    ) -> tuple[tuple[HeadChange, ...], tuple[NeuronChange, ...], dict[str, str]]:
        """Heads and neurons by kind, with both ends of their displacements; what is missing."""
        head_changes, neuron_changes = [], []
        missing: dict[str, str] = {}
        for kind, kept in self.best.items():
            found = [_direction(one.displacement) for one in kept]
            ends: list[tuple[Words, Words]] = [((), ())] * len(kept)
            try:
                if kept:
                    rows = torch.stack([one for one, _ in found])
                    ends = vector_ends(reader, _seen(reader, rows, inverse), tokens)
            except (ModelRefused, BadSettings) as error:  # all else is known by now
                missing["tokens"] = str(error)
            for one, (_, share), both in zip(kept, found, ends, strict=True):
                if kind.startswith("ffn."):
                    neuron_changes.append(_neuron(kind, one, *both))
                else:
                    head_changes.append(_head(kind, one, share, *both))
        return tuple(head_changes), tuple(neuron_changes), missing


def _neuron(kind: str, one: _Candidate, high: Words, low: Words) -> NeuronChange:
    return NeuronChange(one.block, one.number, kind, one.score, one.relative, one.cosine, high, low)


def _head(kind: str, one: _Candidate, share: float, high: Words, low: Words) -> HeadChange:
    if high and low and abs(low[0].score) > abs(high[0].score):
        high, low = (tuple(Scored(w.token, -w.score) for w in end) for end in (low, high))
    return HeadChange(one.block, one.number, kind, one.is_shared, one.score, share, high, low)


def _seen(reader: Transformer, rows: Tensor, inverse: Inverse) -> Tensor:
    """What the output matrix is multiplied by, at unit length."""
    if inverse == "pseudo":
        rows = dual(rows, unembedding(reader))
        rows = rows / rows.norm(dim=1, keepdim=True)
    return rows


def _direction(displacement: Tensor) -> tuple[Tensor, float]:
    """The unit vector along which most of a displacement lies, and its share of the squares."""
    if displacement.dim() == 1:
        return displacement / displacement.norm(), 1.0
    rows = displacement.double()
    values, basis = torch.linalg.eigh(rows @ rows.T)
    direction = basis[:, -1] @ rows
    return (direction / direction.norm()).float(), float(values[-1] / values.sum())
