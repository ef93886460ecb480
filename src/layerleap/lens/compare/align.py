"""Alignment: which layers of two models with one vocabulary hold the same parameters.

In: two wrapped models. Out: `Alignment`: for every kind of vector a similarity of all pairs of
blocks, the blocks matched one to one, and the same in raw coordinates as a control.

Every vector is read as scores of all tokens (the output matrix times the vector), so that models
with other bases, or other widths, can be compared: arXiv 2209.02535, section 4.1.
"""

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from layerleap.arguments import checked
from layerleap.errors import BadSettings, ModelRefused, check_choice
from layerleap.lens.compare.alignment import MEASURES, Alignment, Matching, SpaceName, match_layers
from layerleap.lens.compare.lists import listed
from layerleap.lens.compare.similarity import (
    AFFORDABLE,
    Blocks,
    Comparison,
    Raw,
    Side,
    Vocabulary,
    affordable_rows,
    similarities,
)
from layerleap.maps.kernel import shared_tokens
from layerleap.models.facts import KINDS
from layerleap.models.transformer import Transformer
from layerleap.models.weights import known_tokens, unembedding
from layerleap.progress import Progress, reporting

Spaces = dict[SpaceName, Comparison]


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
    n = _shared_tokens(a, b)
    matrices = unembedding(a)[:n], unembedding(b)[:n]
    chosen = known_tokens(*matrices) if tokens is None else _chosen(n, tokens)
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
    return Alignment(*names, len(chosen), n, fold, seed, matchings, missing)


def _shared_tokens(a: Transformer, b: Transformer) -> int:
    """How many tokens both have, with the same ids; tables may be padded to other sizes."""
    for model in (a, b):
        if model.kind.endswith("-class"):
            raise BadSettings(
                f"{model.identity.name} predicts classes, not tokens; models are aligned by the "
                "tokens of one vocabulary: load it with its language-model head"
            )
    shared = shared_tokens(a, b)
    return a.d_vocab if a.d_vocab == b.d_vocab else shared


def _chosen(n: int, tokens: Sequence[int] | Tensor) -> Tensor:
    ids = torch.as_tensor(tokens, dtype=torch.long).flatten().unique()
    if len(ids) and (ids[0] < 0 or ids[-1] >= n):
        wrong = int(ids[0] if ids[0] < 0 else ids[-1])
        raise BadSettings(f"token {wrong} does not exist; expected 0 to {n - 1}")
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
                for side, present in zip((a, b), both, strict=True)
                if not present
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
    done, (chosen, seed) = count(1), draw
    rows = {
        name: affordable_rows(a, b, blocks, space.width, chosen, AFFORDABLE[name])
        for name, space in spaces.items()
    }
    with reporting(progress) as report:

        def tick() -> None:
            report("comparing blocks", next(done), total, "pairs")

        for kind, both in blocks.items():
            for name, space in spaces.items():
                drawn = rows[name]
                if drawn is not None and drawn >= max(a.count(kind, block) for block in both[0]):
                    drawn = None  # this kind has no more
                by_measure = similarities(space, a, b, kind, both, (drawn, seed), tick)
                matchings += [
                    match_layers(by_measure[m], *both, kind=kind, space=name, measure=m, rows=drawn)
                    for m in MEASURES
                ]
    return tuple(matchings)
