"""Clusters of value vectors that point the same way, named by the tokens they share.

In: the value vectors of all blocks and their token ends. Out: a cluster and a cosine for every
vector; for every cluster the tokens with the largest sum of scores over its members, at both ends.

Mini-batch k-means on unit vectors (scikit-learn): rows are gathered from the weights batch by
batch, so that no copy of all vectors, let alone a matrix of all pairs, is ever made. Centres are
unit vectors, too. A plain mean of many nearly orthogonal vectors lies near zero, closer to any
vector than the centre of a small cluster, and would draw in thousands: on SmolLM2, half of all
clusters then had a single member.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from layerleap.extras import library
from layerleap.progress import Progress, silent

PER_CLUSTER = 40  # vectors, on average; LM-Debugger has 33
MOST = 4096  # clusters by default
BATCH_ROWS, EPOCHS = 4096, 3
NEEDED = "clusters of neurons need it"
NAMES = 10  # tokens that name a cluster, at each end

Values = Callable[[int], Tensor]  # by place in the list of blocks, its vectors (n_neurons, d_model)


class Clustering(NamedTuple):
    """By vector, in order: its cluster, and the cosine between it and the cluster's centre."""

    clusters: NDArray[np.int64]
    cosines: NDArray[np.float32]


class Named(NamedTuple):
    """The tokens that name one end of a cluster, and their sums of scores."""

    ids: NDArray[np.int64]
    sums: NDArray[np.float64]


def default_number(n_vectors: int) -> int:
    """How many clusters suit that many vectors."""
    return max(1, min(MOST, n_vectors // PER_CLUSTER))


def cluster_vectors(
    values: Values, sizes: list[int], number: int, *, seed: int = 0, progress: Progress = silent
) -> Clustering:
    """Every vector's cluster; the same seed gives the same clusters.

    `sizes` are the numbers of vectors of each block; `number` is at most their sum.
    """
    cluster = library("sklearn.cluster", "learn", NEEDED)
    rng = np.random.default_rng(seed)
    # Random first centres: k-means++ takes nearly as long as the rest and gives no better cosines.
    kmeans = cluster.MiniBatchKMeans(
        number, init="random", n_init=1, random_state=seed, reassignment_ratio=0.0
    )
    batch = max(BATCH_ROWS, 3 * number)  # the first batch has to hold a row for every centre
    total, done = sum(sizes), 0
    for _ in range(EPOCHS):
        order = rng.permutation(total)
        for start in range(0, total, batch):
            rows = order[start : start + batch]
            if len(rows) >= number:  # a rest that is too short is in another epoch's batches
                kmeans.partial_fit(_gathered(values, sizes, rows))
                norms = np.linalg.norm(kmeans.cluster_centers_, axis=1, keepdims=True)
                kmeans.cluster_centers_ /= np.maximum(norms, np.finfo(np.float32).tiny)
            progress("clusters", done := done + len(rows), EPOCHS * total, "vectors")
    return _assigned(values, len(sizes), kmeans.cluster_centers_)


def _gathered(values: Values, sizes: list[int], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Unit vectors by number, in ascending order, gathered block by block."""
    rows, parts = np.sort(rows), []
    first = np.concatenate([[0], np.cumsum(sizes)])
    places = np.searchsorted(rows, first)
    for block, start in enumerate(first[:-1]):
        inside = rows[places[block] : places[block + 1]] - start
        if len(inside):
            chosen = values(block)[torch.from_numpy(inside)]
            parts.append(normalize(chosen.float(), dim=1).cpu().numpy())
    return np.concatenate(parts)


def _assigned(values: Values, n_blocks: int, centres: NDArray[Any]) -> Clustering:
    """The centre with the largest cosine to every vector."""
    units = torch.from_numpy(np.ascontiguousarray(centres)).float()
    clusters, cosines = [], []
    for block in range(n_blocks):
        best = (normalize(values(block).float().cpu(), dim=1) @ units.T).max(1)
        clusters.append(best.indices.numpy())
        cosines.append(best.values.numpy())
    return Clustering(np.concatenate(clusters), np.concatenate(cosines))


def cluster_names(
    clusters: NDArray[np.int64], ids: NDArray[np.int32], scores: NDArray[np.float16]
) -> dict[int, Named]:
    """By cluster, the tokens with the largest sum of scores over its members, largest first.

    `ids` and `scores` are those at one end of each vector, (vector, top); scores are negated at the
    lower end, so that more is stronger.
    """
    span = int(ids.max()) + 1
    keys = (clusters[:, None] * span + ids).ravel()
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    sums = np.add.reduceat(scores.ravel()[order].astype(np.float64), starts)
    owners, tokens = np.divmod(keys[starts], span)
    best = np.lexsort((tokens, -sums, owners))  # by cluster, then sum; ties by id
    numbers, firsts = np.unique(owners[best], return_index=True)
    limits = [*firsts[1:], len(best)]
    named = {}
    for number, first, limit in zip(numbers, firsts, limits, strict=True):
        chosen = best[first : min(limit, first + NAMES)]
        named[int(number)] = Named(tokens[chosen], sums[chosen])
    return named
