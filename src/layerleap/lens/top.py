"""Deterministic top-k and ranks of logits: ties are ordered by id."""

import torch
from torch import Tensor

BLOCK = 128  # columns per maximum; measured: 64 and 256 are slower at 49,152 columns
FEW = 512  # up to this many columns are simply sorted


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the top k of each row, best first; ties are ordered by id.

    NaN counts as the highest value, so it always shows up.

    Columns are split into blocks. The top k lie in the k blocks with the highest maxima (the first
    ones if maxima are equal): for any other block there are k blocks with a column that is higher,
    or equal with a lower id. Only the pass for the maxima is V-sized, ties need no special case,
    and it takes a third of the time of `torch.topk`, whose order of ties is arbitrary.
    """
    n = values.shape[-1]
    width = BLOCK if n >= BLOCK * 32 else BLOCK // 8
    if n <= max(FEW, 2 * k * width):
        best = values.sort(dim=-1, descending=True, stable=True)
        return best.values[:, :k], best.indices[:, :k]
    n_blocks = n // width
    maxima = values[:, : n_blocks * width].unflatten(-1, (n_blocks, width)).amax(-1)
    blocks = top_k(maxima, k)[1].sort(-1).values  # back in column order, so ids are sorted
    within = torch.arange(width, device=values.device)
    ids = (blocks[:, :, None] * width + within).flatten(1)
    rest = torch.arange(n_blocks * width, n, device=values.device).expand(len(values), -1)
    ids = torch.cat([ids, rest], dim=1)
    best_values, place = top_k(values.gather(1, ids), k)
    return best_values, ids.gather(1, place)


def ranks_of(scores: Tensor, places: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ranks of one column (in `places`) of each row of scores, from above and from below.

    Ranks from `k` on are given as `k`; ties are ordered by column. Where k blocks of columns have
    one that is ahead, no column needs to be counted.
    """
    values = scores.gather(1, places[:, None])
    whole = scores.shape[1] // BLOCK * BLOCK
    blocks = scores[:, :whole].unflatten(1, (-1, BLOCK)) if whole else scores[:, :, None]
    ends = []
    for extreme, is_ahead in ((torch.amax, torch.gt), (torch.amin, torch.lt)):
        ahead = torch.count_nonzero(is_ahead(extreme(blocks, -1), values), dim=1)
        ranks = torch.full((len(scores),), k)
        for row in (ahead < k).nonzero()[:, 0].tolist():
            rank = torch.count_nonzero(is_ahead(scores[row], values[row]))
            rank += torch.count_nonzero(scores[row, : places[row]] == values[row])
            ranks[row] = rank.clamp(max=k)
        ends.append(ranks)
    return ends[0], ends[1]
