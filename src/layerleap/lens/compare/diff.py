"""What fine-tuning changed: blocks, matrices, heads and neurons that moved, read as tokens.

In: a base model and a tuned one of the same architecture, wrapped or as names of checkpoints.
Out: `Difference`: how far every block and kind of matrix moved, and the heads and vectors that
moved most, each with both ends of what its displacement says in the vocabulary.

Names are read from safetensors files, one block of each model at a time (`model_pair`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused, check_choice
from layerleap.lens.compare.difference import (
    BlockChange,
    Difference,
    HeadChange,
    NeuronChange,
    OutsideChange,
    Words,
)
from layerleap.lens.compare.model_pair import ModelPair, NoWindow, Pieces, Place, open_pair
from layerleap.lens.vocabulary.ends import Scored, vector_ends
from layerleap.lens.vocabulary.index_settings import Inverse
from layerleap.models.facts import KINDS
from layerleap.models.load import Tell
from layerleap.models.transformer import Transformer
from layerleap.models.weights import dual, heads, unembedding, vectors
from layerleap.progress import Progress, reporting

PIECE = 2**23  # numbers that are compared at a time


@checked
def diff(
    base: Transformer | str | Path,
    tuned: Transformer | str | Path,
    *,
    kinds: Sequence[str] | None = None,
    top: int = 10,
    tokens: int = 10,
    inverse: Inverse = "transpose",
    tell: Tell | None = None,
    progress: Progress | bool = True,
) -> Difference:
    """What fine-tuning changed: blocks, heads and neurons that moved most, and towards what.

        ll.diff("smollm2", "smollm2-reviews").neurons[0].promotes

    Names and folders are read from their safetensors files, one block of each model at a time.

    Args:
        base: the model that training started from: a bundled name, hub name, folder or wrapped
            model.
        tuned: the model that training made of it.
        kinds: of vectors, such as "ffn.value" or "attn.o"; all when None.
        top: heads and neurons that are listed per kind.
        tokens: how many at both ends of each displacement.
        inverse: "transpose" scores tokens by the output matrix times the displacement, "pseudo" by
            its pseudo-inverse: the tokens whose rows add up to the displacement. It is less swayed
            by directions that all rows share, but noisier.
        tell: called with a one-line message before anything slow.
        progress: True is a bar on a terminal.
    """
    if top < 0 or tokens < 1:
        raise BadSettings(f"top={top}, tokens={tokens}; expected at least 0 and 1")
    for kind in kinds or ():
        check_choice(kind, KINDS, "kind")
    pair = open_pair(base, tuned, tell)
    chosen = tuple(dict.fromkeys(kinds or KINDS))
    moved, blocks = Moved(chosen, top), []
    with reporting(progress) as report, torch.no_grad():
        outside = tuple(_outside_change(*given) for given in pair.outside())
        for block in range(1, pair.n_layers + 1):
            blocks.append(_block_change(pair, block, chosen, moved, is_asked=bool(kinds)))
            report("comparing blocks", block, pair.n_layers, "blocks")
        heads, neurons, missing = moved.read(pair.reader, tokens, inverse)
    return Difference(
        pair.base, pair.tuned, pair.how, inverse, tuple(blocks), heads, neurons, outside, missing
    )


def _block_change(
    pair: ModelPair, block: int, kinds: Sequence[str], moved: "Moved", *, is_asked: bool
) -> BlockChange:
    try:
        base, tuned = pair.show(block)
    except (NoWindow, ModelRefused) as error:
        return BlockChange(block, None, False, missing={"everything": str(error)})
    sums = _whole_block(pair, block, base, tuned)
    relatives: dict[str, float] = {}
    missing: dict[str, str] = {}
    for kind in kinds:
        try:
            both = vectors(*base, kind), vectors(*tuned, kind)
        except ModelRefused as error:
            missing[kind] = str(error)
        else:
            relatives[kind] = moved.take(block, kind, base, *both)
    if not is_asked:  # no FFN has both "ffn.key" and "ffn.gate": only a part with neither is news
        parts = {kind.partition(".")[0] for kind in relatives}
        missing = {k: why for k, why in missing.items() if k.partition(".")[0] not in parts}
    return BlockChange(block, sums.relative, sums.is_identical, relatives, missing)


def _whole_block(pair: ModelPair, block: int, base: Place, tuned: Place) -> "_Sums":
    """All parameters of a block, norms and biases included."""
    sums = _Sums()
    a, b = (dict(model.block(place).named_parameters()) for model, place in (base, tuned))
    for name in {**a, **b}:
        if name not in a or name not in b or a[name].shape != b[name].shape:
            raise BadSettings(
                f"{name} of block {block} has different shapes in {pair.base} and {pair.tuned}; a "
                "tuned model has the architecture of its base"
            )
        sums.add(a[name].detach(), b[name].detach())
    return sums


@dataclass
class _Sums:
    """Squares of a displacement and of what it started from, added up tensor by tensor."""

    moved: float = 0.0
    base: float = 0.0
    is_identical: bool = True
    n_tensors: int = 0

    def add(self, base: Tensor, tuned: Tensor) -> None:
        """Take in one tensor of both models; quantised ones are only checked for identity."""
        self.n_tensors += 1
        self.is_identical &= base.dtype == tuned.dtype and torch.equal(base, tuned)
        if not base.is_floating_point() or not tuned.is_floating_point():
            return
        flat = (tensor.reshape(-1).split(PIECE) for tensor in (base, tuned))
        for x, y in zip(*flat, strict=True):
            self.moved += float((y.double() - x.double()).square().sum())
            self.base += float(x.double().square().sum())

    @property
    def relative(self) -> float | None:
        """Displacement over what it started from; None if that is 0 and something moved."""
        if self.base == 0:
            return 0.0 if self.moved == 0 else None
        return math.sqrt(self.moved / self.base)


def _outside_change(name: str, pieces: Pieces, remark: str) -> OutsideChange:
    sums, is_known = _Sums(), False
    for base, tuned in pieces:
        sums.add(base, tuned)
        is_known = True
    if not is_known:
        return OutsideChange(name, None, False, remark)
    return OutsideChange(name, sums.relative, sums.is_identical and not remark, remark)


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
