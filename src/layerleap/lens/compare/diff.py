"""What fine-tuning changed: blocks, matrices, heads and neurons that moved, read as tokens.

In: a base model and a tuned one of the same architecture, wrapped or as names of checkpoints.
Out: `Difference`: how far every block and kind of matrix moved, and the heads and vectors that
moved most, each with both ends of what its displacement says in the vocabulary.

Names are read from safetensors files, one block of each model at a time (`model_pair`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
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
        progress: True is a bar on a terminal.
    """
    if top < 0 or tokens < 1:
        raise BadSettings(f"top={top}, tokens={tokens}; expected at least 0 and 1")
    for kind in kinds or ():
        check_choice(kind, KINDS, "kind")
    pair = open_pair(base, tuned)
    chosen = tuple(dict.fromkeys(kinds or KINDS))
    moved, blocks = Moved(chosen, top), []
    with reporting(progress) as report, torch.no_grad():
        outside = tuple(starmap(_outside_change, pair.outside()))
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
    sums = _Sums()
    for base, tuned in pieces:
        sums.add(base, tuned)
    if not sums.n_tensors:
        return OutsideChange(name, None, False, remark)
    return OutsideChange(name, sums.relative, sums.is_identical and not remark, remark)


class _Candidate(NamedTuple):
    score: float  # that decides which moved most
    place: tuple[int, int]  # the block, and the neuron or head
    change: HeadChange | NeuronChange  # without tokens
    displacement: Tensor  # (d_model,), or (d_head, d_model)


class Moved:
    """The vectors and heads that moved most so far, by kind; only as many as are listed are kept.

    A displacement is theta_tuned - theta_base; its tokens are those of the base's output matrix
    times the displacement (arXiv 2209.02535, section 5), at unit length: scores of a vector that
    moved little can then be compared with those of one that moved far. The displacement of a head
    is a matrix, (d_head, d_model), which is read along the direction that holds most of it. A
    direction has no sign, so the two ends of a head could be swapped; the stronger one comes first.
    """

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
            change = NeuronChange(block, row, kind, norm, relative, cosine)
            return _Candidate(norm, (block, row), change, shift[row].float().clone())

        self._offer(kind, norms, candidate)

    def _take_heads(
        self, block: int, kind: str, where: Place, start: Tensor, shift: Tensor
    ) -> None:
        facts = heads(*where)
        n_heads = facts.n_heads if kind in ("attn.q", "attn.o") else facts.n_kv_heads
        is_shared = n_heads < facts.n_heads
        parts = shift.reshape(n_heads, -1, shift.shape[1])
        sizes = start.reshape(n_heads, -1).norm(dim=1).clamp_min(torch.finfo(start.dtype).tiny)
        relatives = parts.flatten(1).norm(dim=1) / sizes

        def candidate(row: int) -> _Candidate:
            score = float(relatives[row])
            change = HeadChange(block, row, kind, is_shared, score, share=1.0)
            return _Candidate(score, (block, row), change, parts[row].float().clone())

        self._offer(kind, relatives, candidate)

    def _offer(self, kind: str, scores: Tensor, candidate: Callable[[int], _Candidate]) -> None:
        best = self.best[kind]
        values, rows = scores.topk(min(self.top, len(scores)))
        for value, row in zip(values.tolist(), rows.tolist(), strict=True):
            if value > 0 and (len(best) < self.top or value > best[-1].score):
                best.append(candidate(row))
                best.sort(key=lambda one: (-one.score, one.place))
                del best[self.top :]

    def read(
        self, reader: Transformer, tokens: int, inverse: Inverse
    ) -> tuple[tuple[HeadChange, ...], tuple[NeuronChange, ...], dict[str, str]]:
        """Heads and neurons by kind, with both ends of their displacements; what is missing."""
        head_changes, neuron_changes = [], []
        missing: dict[str, str] = {}
        for candidates in filter(None, self.best.values()):
            directions = [_direction(one.displacement) for one in candidates]
            ends: list[tuple[Words, Words]] = [((), ())] * len(candidates)
            try:
                rows = torch.stack([direction for direction, _ in directions])
                if inverse == "pseudo":
                    rows = dual(rows, unembedding(reader))
                    rows = rows / rows.norm(dim=1, keepdim=True)
                ends = vector_ends(reader, rows, tokens)
            except (ModelRefused, BadSettings) as error:  # all else is known by now
                missing["tokens"] = str(error)
            changes = (one.change for one in candidates)
            for change, (_, share), (high, low) in zip(changes, directions, ends, strict=True):
                if isinstance(change, NeuronChange):
                    neuron_changes.append(replace(change, promotes=high, suppresses=low))
                    continue
                if high and low and abs(low[0].score) > abs(high[0].score):
                    high, low = (tuple(Scored(w.token, -w.score) for w in e) for e in (low, high))
                head_changes.append(replace(change, share=share, promotes=high, suppresses=low))
        return tuple(head_changes), tuple(neuron_changes), missing


def _direction(displacement: Tensor) -> tuple[Tensor, float]:
    """The unit vector along which most of a displacement lies, and its share of the squares."""
    if displacement.dim() == 1:
        return displacement / displacement.norm(), 1.0
    rows = displacement.double()
    values, basis = torch.linalg.eigh(rows @ rows.T)
    direction = basis[:, -1] @ rows
    return (direction / direction.norm()).float(), float(values[-1] / values.sum())
