"""The embeddings of a model: the matrix that makes logits, and the one that tokens enter by.

In: a wrapped model. Out: E, (d_vocab, d_model), and what reading with its pseudo-inverse needs.

A vector w that reads the stream is seen in the vocabulary as E w (the transposed embedding), or as
E (E^T E)^-1 w (the pseudo-inverse, which keeps inner products exactly while all tokens are kept).
So the second is the first, of another vector: `dual`.
"""

import torch
from torch import Tensor

from layerleap.errors import BadSettings, ModelRefused
from layerleap.models.changes import Known
from layerleap.models.transformer import Transformer

_PRODUCTS: Known[dict[torch.device, Tensor]] = Known()


def unembedding(transformer: Transformer) -> Tensor:
    """The matrix that makes logits of states: (d_vocab, d_model).

    A view of the weights where one matrix does it. Where the head has several (OPT 350m, BERT), it
    is their product; activations and norms between them are left out.
    """
    matrices = _head_matrices(transformer)
    if len(matrices) == 1:
        return matrices[0]
    transformer.refresh()
    known, device = _PRODUCTS.of(transformer, dict), matrices[0].device
    if device not in known:
        product = matrices.pop()
        while matrices:
            product = product @ matrices.pop()
        known[device] = product
    return known[device]


def _head_matrices(transformer: Transformer) -> list[Tensor]:
    """The matrices of the tail in order, each taking what the one before gives."""
    name, matrices = transformer.identity.name, []
    for step in transformer.tail:
        if step.kind == "module":
            modules = transformer.model.get_submodule(step.path).modules()
            weights = [getattr(module, "weight", None) for module in modules]
            matrices += [w.detach() for w in weights if isinstance(w, Tensor) and w.dim() == 2]
    if not matrices or any(w.is_meta or not w.is_floating_point() for w in matrices):
        raise ModelRefused(
            f"the logits of {name} are not made by a matrix in memory (offloaded or quantised "
            "weights), so vectors cannot be read in its vocabulary"
        )
    widths = [transformer.d_model, *(len(matrix) for matrix in matrices)]
    if any(w.shape[1] != width for w, width in zip(matrices, widths, strict=False)):
        shapes = ", ".join(str(tuple(matrix.shape)) for matrix in matrices)
        raise ModelRefused(
            f"the matrices of the head of {name} ({shapes}) do not follow one another from "
            f"{transformer.d_model} numbers to logits, so vectors cannot be read in its vocabulary"
        )
    return matrices


def embedding(transformer: Transformer) -> Tensor:
    """The matrix by which tokens enter the stream: (tokens, d_model), a view of the weights.

    A factor that a family applies to it (Gemma) is left out: it changes no order of tokens.
    """
    name = transformer.identity.name
    module = transformer.model.get_input_embeddings()
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ModelRefused(f"{name} has no embedding of tokens")
    if weight.is_meta or not weight.is_floating_point():
        raise ModelRefused(f"the embedding of {name} is offloaded or quantised")
    if weight.shape[1] != transformer.d_model:
        raise ModelRefused(
            f"the embedding of {name} is {weight.shape[1]} wide and its stream "
            f"{transformer.d_model}, so tokens do not enter the stream by a row of it"
        )
    return weight.detach()


@torch.no_grad()
def gram(matrix: Tensor, rows: int = 8192) -> Tensor:
    """E^T E in float64: (d_model, d_model), added up over blocks of tokens."""
    total = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64)
    for part in matrix.split(rows):
        exact = part.double().cpu()
        total += exact.T @ exact
    return total


@torch.no_grad()
def dual(vectors: Tensor, matrix: Tensor, products: Tensor | None = None) -> Tensor:
    """Vectors whose scores E w are the pseudo-inverse readings of the given ones: (n, d_model).

    Args:
        vectors: (n, d_model).
        matrix: E, (tokens, d_model).
        products: `gram(matrix)`, if it was computed before.
    """
    tokens, width = matrix.shape
    if tokens < width:
        raise BadSettings(
            f"a vocabulary of {tokens} tokens is smaller than the width of the stream, {width}, so "
            "its embedding has no right inverse; read with the transposed embedding"
        )
    exact = gram(matrix) if products is None else products
    values, basis = torch.linalg.eigh(exact)
    # Squares of singular values: below this, float32 embeddings are zero up to rounding.
    if values[0] <= values[-1] * 1e-13:
        raise BadSettings(
            f"the embedding of {tokens} tokens has not full rank {width}, so it has no right "
            "inverse; read with the transposed embedding"
        )
    solved = vectors.double().cpu() @ (basis / values) @ basis.T
    return solved.to(vectors.device, torch.promote_types(vectors.dtype, torch.float32))


def known_tokens(*matrices: Tensor, rows: int = 8192) -> Tensor:
    """The ids of the tokens that all matrices have a row for that is not 0.

    A token without such a row gets the score 0 from every vector. It says nothing about them, but
    would count in means, ranks and correlations.
    """
    known = [torch.cat([part.ne(0).any(1).cpu() for part in m.split(rows)]) for m in matrices]
    length = min(map(len, known))
    return torch.stack([mask[:length] for mask in known]).all(0).nonzero()[:, 0]
