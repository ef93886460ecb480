"""Kernels: matrices that carry a state of one model into the basis of another.

In: two models that share a vocabulary; for a fitted kernel also texts.
Out: K with h_B ~ h_A @ K, as a float64 matrix or a `LinearMap`.

    embedding       K = E_A^T E_B (E_B^T E_B)^-1: both models should give a token the same score.
                    Of all states of B, h_A K comes closest to h_A's scores of all tokens
    folded          the same with final norms in E and without the mean row: the same logits, up to
                    a factor and a constant
    least squares   fitted on the states of both models over a text, with the moments of `stats`
    random          the singular values of the embedding kernel with random directions, a control

E is (V, d): the matrix that makes logits, or the input embedding of a model that gives no token
scores (a classifier). "Analyzing Transformers in Embedding Space" (arXiv 2209.02535) calls it
E_A E_B^+, with E of (d, V).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from layerleap.errors import BadSettings, NothingToFit
from layerleap.maps.fit import FEW_ROWS_RIDGE, ROWS_PER_DIRECTION
from layerleap.maps.linear import FitReport, LinearMap, solve
from layerleap.models.hooks.capture import check_layer
from layerleap.models.transformer import Transformer
from layerleap.models.weights import dual, embedding, gram, known_tokens, unembedding
from layerleap.models.weights.norms import final_fold
from layerleap.progress import Progress, silent
from layerleap.stats.moments import Moments
from layerleap.stream.examples import Batch

BLOCK = 8192  # tokens multiplied at a time
TOKENS = ("next-token", "masked-token")  # kinds of models whose logits are token scores

LayerPair = tuple[int, int]  # a layer of A and a layer of B


def vocabulary_matrix(transformer: Transformer) -> Tensor:
    """E of a model: (V, d)."""
    return unembedding(transformer) if transformer.kind in TOKENS else embedding(transformer)


def shared_tokens(a: Transformer, b: Transformer) -> int:
    """How many tokens both models have; `BadSettings` if one id is not the same token in both."""
    rows = [len(vocabulary_matrix(one)) for one in (a, b)]
    names = f"{a.identity.name} and {b.identity.name}"
    if a.tokenizer is None or b.tokenizer is None:
        if rows[0] != rows[1]:
            raise BadSettings(
                f"{names} have {rows[0]:,} and {rows[1]:,} tokens, and no tokenizers that tell "
                "which are the same; expected two models with one vocabulary"
            )
        return rows[0]
    ours, theirs = a.tokenizer.get_vocab(), b.tokenizer.get_vocab()
    if ours != theirs:
        raise BadSettings(
            f"{names} have different vocabularies: {_difference(ours, theirs)}; expected two "
            "models with one vocabulary"
        )
    return min(*rows, max(ours.values()) + 1)  # tables are often padded


def _difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """How many tokens only one of two vocabularies has, or has with another id."""
    moved = [token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token]]
    if moved:
        return f"{len(moved):,} of their tokens, such as {min(moved)!r}, have different ids"
    alone = ours.keys() ^ theirs.keys()
    return f"only one of them has {min(alone)!r}" + (
        f" and {len(alone) - 1:,} other tokens" if len(alone) > 1 else ""
    )


def embedding_kernel(a: Transformer, b: Transformer, *, folded: bool = False) -> Tensor:
    """K = E_A^T E_B (E_B^T E_B)^-1: (d_A, d_B), float64.

    Folded, E has the gain of the final norm multiplied in and the mean row subtracted. Scores are
    then those of the logits, up to the size of the state and a constant for all tokens, neither of
    which changes what a state says.

    Raises `BadSettings` if the vocabularies differ, or B has fewer tokens than its width.
    """
    n = shared_tokens(a, b)
    ours, theirs = (vocabulary_matrix(one)[:n] for one in (a, b))
    known = known_tokens(ours, theirs)
    if len(known) < n:  # the score of a token that one model does not know is no example
        ours, theirs = ours[known.to(ours.device)], theirs[known.to(theirs.device)]
    if folded:
        folds = final_fold(a), final_fold(b)
        pairs = zip(folds, (ours, theirs), strict=True)
        ours, theirs = (rows.float() if f is None else f.into_reader(rows) for f, rows in pairs)
        ours, theirs = ours - ours.mean(0), theirs - theirs.mean(0)
    cross = torch.zeros(a.d_model, b.d_model, dtype=torch.float64)
    for start in range(0, len(known), BLOCK):
        x, y = (one[start : start + BLOCK].cpu().double() for one in (ours, theirs))
        cross += x.T @ y
    products = gram(theirs)
    if folded and folds[1] is not None and folds[1].centres:
        # No score depends on the mean of a state, so any mean will do: 0 is chosen.
        products += products.diagonal().mean() / len(products)
    try:
        return dual(cross, theirs, products)
    except BadSettings as error:
        reason = str(error).partition(";")[0]
        raise BadSettings(
            f"{reason}; states are carried to {b.identity.name} by kernel='least-squares' only"
        ) from error


def random_kernel(like: Tensor, seed: int = 0) -> Tensor:
    """A matrix with the singular values of `like` and random directions."""
    values = torch.linalg.svdvals(like.double())
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(width, len(values), dtype=torch.float64, generator=generator)).Q
        for width in like.shape
    )
    return (left * values) @ right.T


def fit_kernels(
    a: Transformer,
    b: Transformer,
    pairs: Sequence[LayerPair],
    batches: Iterable[Batch],
    *,
    ridge: float | None = None,
    n_texts: int | None = None,
    progress: Progress = silent,
) -> dict[LayerPair, tuple[LinearMap, FitReport]]:
    """Kernels from layers of A to layers of B by least squares, in one pass over the batches.

    Args:
        pairs: (layer of A, layer of B).
        batches: of texts as A reads them; the kept positions are fitted on.
        ridge: penalty as a fraction of the mean eigenvalue; by default none, unless rows are few.
        n_texts: how many texts there will be, for the progress.
    """
    for layer_a, layer_b in pairs:
        check_layer(a, layer_a)
        check_layer(b, layer_b)
    width = max(a.d_model, b.d_model)
    names = [name for i, j in pairs for name in (f"layer {i} of A", f"layer {j} of B")]
    moments, texts = Moments(2 * len(pairs) - 1, width, "parts", names), 0
    for batch in batches:
        x = a.capture(batch.inputs, layers={i for i, _ in pairs}, keep=batch.keep).states
        y = b.capture(batch.inputs, layers={j for _, j in pairs}, keep=batch.keep).states
        # Zeros for the coordinates that only the wider model has: one that is always 0 is not
        # determined, so the solution has zeros there, too.
        states = (h.detach().cpu() for i, j in pairs for h in (x[i], y[j]))
        moments.add([torch.nn.functional.pad(h, (0, width - h.shape[-1])) for h in states])
        texts += batch.n_texts
        progress("fitting kernels", texts, n_texts)
    if not moments.rows:
        raise NothingToFit("no rows to fit a kernel on; give more text")
    if ridge is None:
        ridge = FEW_ROWS_RIDGE if moments.rows < ROWS_PER_DIRECTION * a.d_model else 0.0
    return {
        # Of the mean eigenvalue without the padding.
        pair: _solved(moments, number, pair, (a.d_model, b.d_model), ridge * width / a.d_model)
        for number, pair in enumerate(pairs)
    }


def _solved(
    moments: Moments, number: int, pair: LayerPair, shape: tuple[int, int], ridge: float
) -> tuple[LinearMap, FitReport]:
    (linear, report), *_ = solve(moments, 2 * number, ridge=ridge)
    weight = linear.tensors()["weight"][: shape[0], : shape[1]].contiguous()
    report = replace(report, src=pair[0], dst=pair[1], width=shape[0])
    return LinearMap(*pair, weight=weight), report
