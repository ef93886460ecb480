"""Alignment: which layers of two models with one vocabulary hold the same parameters.

In: two wrapped models. Out: `Alignment`: for every kind of vector a similarity of all pairs of
blocks, the blocks matched one to one, and the same in raw coordinates as a control.

Every vector is read as scores of all tokens (the output matrix times the vector), so that models
with other bases, or other widths, can be compared: arXiv 2209.02535, section 4.1.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused, check_choice
from layerleap.models.transformer import Transformer
from layerleap.models.weights import KINDS, known_tokens, unembedding
from layerleap.progress import Progress, reporting
from layerleap.read.compare.alignment import MEASURES, Alignment
from layerleap.read.compare.kernels import Raw, Space, Vocabulary
from layerleap.read.compare.lists import listed
from layerleap.read.compare.matching import Matching, SpaceName, match_layers
from layerleap.read.compare.similarity import (
    AFFORDABLE,
    Blocks,
    Side,
    affordable_rows,
    similarities,
)

Spaces = dict[SpaceName, Space]


@checked
def align(
    a: Transformer,
    b: Transformer,
    *,
    kinds: Sequence[str] | None = None,
    tokens: Sequence[int] | Tensor | None = None,
    rows: int | None = None,
    seed: int = 0,
    fold: bool = False,
    control: bool = True,
    progress: Progress | bool = True,
) -> Alignment:
    """Match the blocks of two models with one vocabulary by what their vectors say about tokens.

        ll.align(model, other).matching("ffn.value").matches

    Args:
        kinds: of vectors, such as "ffn.value" or "attn.q"; all that both models have when None.
        tokens: ids over which correlations are taken; when None, all but those whose row of the
            output matrix is 0 in either model. Rows of tokens that a small model has never met
            are noise, if they are not 0.
        rows: vectors of `a` per block and kind, drawn at random; they are compared with all
            vectors of `b`. None takes all, unless that would take many minutes; the result says so.
        seed: of the draw.
        fold: multiply by the norm in front of readers, and by the final norm for writers.
        control: match in raw coordinates as well; needs equal widths.
        progress: True is a bar on a terminal.
    """
    if rows is not None and rows < 1:
        raise BadSettings(f"rows is {rows}; expected 1 or more")
    for kind in kinds or ():
        check_choice(kind, KINDS, "kind")
    _check_vocabularies(a, b)
    matrices = unembedding(a), unembedding(b)
    chosen = known_tokens(*matrices) if tokens is None else _chosen(a, tokens)
    if len(chosen) < 2:
        raise BadSettings(f"{len(chosen)} tokens to compare over; a correlation needs at least 2")
    sides = Side(a, fold), Side(b, fold)
    blocks, missing = _blocks(*sides, kinds)
    spaces: Spaces = {"vocabulary": Vocabulary.of(*matrices, chosen)}
    if control and a.d_model == b.d_model:
        spaces["raw"] = Raw(a.d_model)
    elif control:
        missing["raw"] = (
            f"raw coordinates cannot be compared: the models are {a.d_model} and {b.d_model} wide"
        )
    matchings = _matchings(spaces, *sides, blocks, (rows, seed), progress)
    names = a.identity.name, b.identity.name
    return Alignment(*names, len(chosen), a.d_vocab, fold, seed, matchings, missing)


def _check_vocabularies(a: Transformer, b: Transformer) -> None:
    names = f"{a.identity.name} and {b.identity.name}"
    for one in (a, b):
        if one.kind.endswith("-class"):
            raise BadSettings(
                f"{one.identity.name} predicts classes, not tokens; models are aligned by the "
                "tokens of one vocabulary: load it with its language-model head"
            )
    if a.d_vocab != b.d_vocab:
        raise BadSettings(
            f"{names} have different vocabularies: {a.d_vocab:,} and {b.d_vocab:,} tokens; models "
            "can be aligned only over one vocabulary"
        )
    if a.tokenizer is None or b.tokenizer is None:
        return
    own, other = a.tokenizer.get_vocab(), b.tokenizer.get_vocab()
    if own != other:
        differ = [word for word in own.keys() | other.keys() if own.get(word) != other.get(word)]
        raise BadSettings(
            f"{names} have different vocabularies: {len(differ):,} tokens, such as "
            f"{min(differ)!r}, have different ids; models can be aligned only over one vocabulary"
        )


def _chosen(transformer: Transformer, tokens: Sequence[int] | Tensor) -> Tensor:
    """The chosen ids, in order and each once."""
    ids = torch.as_tensor(tokens, dtype=torch.long).flatten().unique()
    if len(ids) and (ids[0] < 0 or ids[-1] >= transformer.d_vocab):
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        raise BadSettings(f"token {wrong} does not exist; expected 0 to {transformer.d_vocab - 1}")
    return ids


def _blocks(a: Side, b: Side, kinds: Sequence[str] | None) -> tuple[Blocks, dict[str, str]]:
    """The blocks to compare by kind, and why others are not."""
    missing = {**a.missing(), **b.missing()}
    blocks = {}
    for kind in dict.fromkeys(kinds or KINDS):
        both = a.blocks(kind), b.blocks(kind)
        if all(both):
            blocks[kind] = both
        elif kinds or any(both):  # no FFN has both "ffn.key" and "ffn.gate": that is no news
            missing |= {
                f"{kind} of {side.name}": side.why_not(kind)
                for side, own in zip((a, b), both, strict=True)
                if not own
            }
    if not blocks:
        raise ModelRefused(
            f"{a.name} and {b.name} have no kind of vector in common; {'; '.join(listed(missing))}"
        )
    return blocks, missing


def _matchings(
    spaces: Spaces,
    a: Side,
    b: Side,
    blocks: Blocks,
    draw: tuple[int | None, int],
    progress: Progress | bool,
) -> tuple[Matching, ...]:
    matchings: list[Matching] = []
    total = sum(len(in_a) * len(in_b) for in_a, in_b in blocks.values()) * len(spaces)
    done, (wanted, seed) = 0, draw
    rows = {
        name: affordable_rows(a, b, blocks, space.width, wanted, AFFORDABLE[name])
        for name, space in spaces.items()
    }
    with reporting(progress) as report:

        def tick() -> None:
            nonlocal done
            done += 1
            report("comparing blocks", done, total, "pairs")

        for kind, both in blocks.items():
            for name, space in spaces.items():
                drawn = rows[name]
                if drawn is not None and drawn >= max(a.count(kind, block) for block in both[0]):
                    drawn = None  # this kind has no more
                found = similarities(space, a, b, kind, both, (drawn, seed), tick)
                about: dict[str, Any] = {"kind": kind, "space": name, "rows": drawn}
                matchings += [match_layers(found[m], *both, measure=m, **about) for m in MEASURES]
    return tuple(matchings)
