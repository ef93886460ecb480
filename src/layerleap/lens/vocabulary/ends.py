"""Value vectors read in the vocabulary: the tokens that each promotes and suppresses most.

In: a block's neurons and the model's output matrix E, (d_vocab, d_model).
Out: the two ends of E v for every value vector v: ids and scores of the highest and lowest tokens.

No norm is applied to v, as in LM-Debugger: the final norm divides by the size of the whole state,
which a single vector does not know. So scores of different vectors compare only roughly; the order
of the tokens of one vector is what counts. Where a norm follows the FFN (Gemma 2), v is what that
norm makes of it at a root mean square of 1, because that is what enters the stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from layerleap.errors import BadSettings
from layerleap.lens.vocabulary.tokens import TokenLabel, output_label
from layerleap.models.transformer import Transformer
from layerleap.models.weights import FeedForward, unembedding
from layerleap.results.plain import Plain

PIECE_BYTES = 2**27  # of one float32 product, and of one slice of the matrix


class Ends(NamedTuple):
    """The tokens at one end, best first: ids int32 and scores float32, both (vector, top)."""

    ids: Tensor
    scores: Tensor


@torch.no_grad()
def both_ends(values: Tensor, matrix: Tensor, top: int) -> tuple[Ends, Ends]:
    """The promoted and the suppressed end of each vector; equal scores are ordered by id.

    `values` are float32, (vector, d_model); the output matrix is (d_vocab, d_model), of any type.
    """
    columns = max(1, PIECE_BYTES // (4 * matrix.shape[1]))
    rows = max(1, PIECE_BYTES // (4 * min(columns, len(matrix))))
    pieces = [
        _ends_of(part, matrix, columns, min(top, len(matrix)))
        for part in values.to(matrix.device).split(rows)
    ]
    promoted, suppressed = zip(*pieces, strict=True)
    return _packed(promoted), _packed(suppressed, sign=-1)


Top = tuple[Tensor, Tensor]  # scores and ids, best first


def _ends_of(values: Tensor, matrix: Tensor, columns: int, top: int) -> tuple[Top, Top]:
    """Both ends of a few vectors; the lower one with its scores negated."""
    high, low = [], []
    for first in range(0, len(matrix), columns):
        # Slices, because all of a bfloat16 matrix as float32 may be larger than the rest together.
        scores = values @ matrix[first : first + columns].float().T
        high.append(_highest(scores, top, first))
        low.append(_highest(scores.neg_(), top, first))
    return _merged(high, top), _merged(low, top)


def _highest(scores: Tensor, top: int, first: int) -> Top:
    """The top of each row, ties by id; `first` is the id of the first column.

    `torch.topk` is four times as fast as `lens.top.top_k` for 50 of 49,152, but its order of ties
    is arbitrary. One more than needed shows whether a tie was cut in two; such a row is sorted.
    """
    best = scores.topk(min(top + 1, scores.shape[1]))
    cut = best.values[:, top - 1 : top + 1]
    values, ids = best.values[:, :top], best.indices[:, :top]
    ids, place = ids.sort(1)
    values, place = values.gather(1, place).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, place)
    if cut.shape[1] == 2 and (tied := cut[:, 0] == cut[:, 1]).any():
        whole = scores[tied].sort(dim=1, descending=True, stable=True)
        ids[tied] = whole.indices[:, :top]
    return values, ids + first


def _merged(slices: list[Top], top: int) -> Top:
    """The top of several slices; earlier slices have lower ids, so a stable sort keeps ties."""
    if len(slices) == 1:
        return slices[0]
    values, ids = (torch.cat(parts, 1) for parts in zip(*slices, strict=True))
    values, place = values.sort(dim=1, descending=True, stable=True)
    return values[:, :top], ids.gather(1, place[:, :top])


def _packed(pieces: Sequence[Top], sign: int = 1) -> Ends:
    values, ids = (torch.cat(parts).cpu() for parts in zip(*pieces, strict=True))
    return Ends(ids.int(), sign * values)


@dataclass(frozen=True)
class Scored(Plain):
    """A token and its score: a logit that a vector adds."""

    token: TokenLabel
    score: float


def check_neuron(ffn: FeedForward, neuron: int) -> None:
    """Refuse a neuron that the block does not have."""
    if not 0 <= neuron < ffn.n_neurons:
        raise BadSettings(
            f"neuron {neuron} does not exist: block {ffn.block} has neurons 0 to "
            f"{ffn.n_neurons - 1}"
        )


def vector_ends(
    transformer: Transformer, vectors: Tensor, top: int, matrix: Tensor | None = None
) -> list[tuple[tuple[Scored, ...], tuple[Scored, ...]]]:
    """For each vector, the tokens it promotes most and those it suppresses most.

    Read through the output matrix, or any other of (d_vocab, d_model).
    """
    matrix = unembedding(transformer) if matrix is None else matrix
    high, low = both_ends(vectors.float(), matrix, top)

    def scored(end: Ends, row: int) -> tuple[Scored, ...]:
        pairs = zip(end.ids[row].tolist(), end.scores[row].tolist(), strict=True)
        return tuple(Scored(output_label(transformer, index), score) for index, score in pairs)

    return [(scored(high, row), scored(low, row)) for row in range(len(vectors))]
