"""What fine-tuning changed: blocks, matrices, heads and neurons that moved, read as tokens.

In: a base model and a tuned one of the same architecture, wrapped or as names of checkpoints.
Out: `Difference`: how far every block and kind of matrix moved, and the heads and vectors that
moved most, each with both ends of what its displacement says in the vocabulary.

Names are read from safetensors files, one block of each model at a time (`checkpoint`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused, check_choice
from layerleap.lens.compare.checkpoint import NoWindow
from layerleap.lens.compare.difference import BlockChange, Difference, OutsideChange
from layerleap.lens.compare.moved import Moved
from layerleap.lens.compare.pair import ModelPair, Pieces, Place, open_pair
from layerleap.lens.vocabulary.settings import Inverse
from layerleap.models.facts import KINDS
from layerleap.models.transformer import Transformer
from layerleap.models.weights import vectors
from layerleap.progress import Progress, reporting
from layerleap.zoo.download import Tell

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
    pair: ModelPair, block: int, kinds: Sequence[str], moved: Moved, *, is_asked: bool
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
    own, theirs = (dict(model.block(place).named_parameters()) for model, place in (base, tuned))
    for name in {**own, **theirs}:
        if name not in own or name not in theirs or own[name].shape != theirs[name].shape:
            raise BadSettings(
                f"{name} of block {block} has different shapes in {pair.base} and {pair.tuned}; a "
                "tuned model has the architecture of its base"
            )
        sums.add(own[name].detach(), theirs[name].detach())
    return sums


@dataclass
class _Sums:
    """Squares of a displacement and of what it started from, added up tensor by tensor."""

    moved: float = 0.0
    own: float = 0.0
    is_identical: bool = True

    def add(self, base: Tensor, tuned: Tensor) -> None:
        """Take in one tensor of both models; quantised ones are only checked for identity."""
        self.is_identical &= base.dtype == tuned.dtype and torch.equal(base, tuned)
        if not base.is_floating_point() or not tuned.is_floating_point():
            return
        flat = (tensor.reshape(-1).split(PIECE) for tensor in (base, tuned))
        for x, y in zip(*flat, strict=True):
            self.moved += float((y.double() - x.double()).square().sum())
            self.own += float(x.double().square().sum())

    @property
    def relative(self) -> float | None:
        """Displacement over what it started from; None if that is 0 and something moved."""
        if self.own == 0:
            return 0.0 if self.moved == 0 else None
        return math.sqrt(self.moved / self.own)


def _outside_change(name: str, pieces: Pieces, remark: str) -> OutsideChange:
    sums, is_known = _Sums(), False
    for base, tuned in pieces:
        sums.add(base, tuned)
        is_known = True
    if not is_known:
        return OutsideChange(name, None, False, remark)
    return OutsideChange(name, sums.relative, sums.is_identical and not remark, remark)
