"""The embedding space of a model: vectors that read or write the stream, as scores of tokens.

In: a wrapped model. Out: `Space`: the matrix that tokens are read from, the one they are written
through, and the scores of all tokens for a few vectors.

    h w = (h E)(E' w)    for any right inverse E' of E, the output matrix as (d_model, d_vocab)

(arXiv 2209.02535). h E are the logits of a state, so E' w says which tokens a vector w looks for,
and w E which tokens it writes. E' is E transposed, or the pseudo-inverse. The pseudo-inverse keeps
inner products exactly, but only if all tokens are kept; for the first few of a list, E transposed
is the better choice, and the default.

A vector that reads is read through the input matrix where that is another matrix (untied models,
and BERT, whose head has a transform of its own), because this is what the tokens of a text bring
into the stream. `source_name` says which matrix it is.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from layerleap.errors import ModelRefused
from layerleap.lens.vocabulary.index_settings import Inverse, Norms
from layerleap.models.transformer import Transformer
from layerleap.models.weights import dual, embedding, known_tokens, unembedding

PIECE_ROWS = 8192  # of a matrix that are made float32 at a time


@dataclass(frozen=True, eq=False, repr=False)
class Space:
    """How the vectors of one model are read as tokens."""

    transformer: Transformer
    norms: Norms
    inverse: Inverse
    source: Tensor  # (d_vocab, d_model): tokens as they enter the stream
    target: Tensor  # (d_vocab, d_model): tokens as the stream writes them
    source_name: str
    source_note: str = ""  # why it is not the input matrix, if it should be

    @classmethod
    def of(cls, transformer: Transformer, norms: Norms, inverse: Inverse) -> "Space":
        """The space of a model; `ModelRefused` if it has no vocabulary."""
        name = transformer.identity.name
        if transformer.kind.endswith("-class"):
            raise ModelRefused(
                f"{name} predicts classes, not tokens, so its parameters cannot be read in a "
                "vocabulary; expected a causal or masked language model"
            )
        target, note = unembedding(transformer), ""
        try:
            source = embedding(transformer)
        except ModelRefused as error:
            source, source_name, note = target, "output matrix", str(error)
        else:
            is_tied = source.data_ptr() == target.data_ptr() and source.shape == target.shape
            source_name = "tied matrix" if is_tied else "input matrix"
        space = cls(transformer, norms, inverse, source, target, source_name, note)
        if inverse == "pseudo":
            _ = space._inverse_gram  # which says why, if there is none
        return space

    @property
    def folds(self) -> bool:
        """True if the gains of norms are multiplied into the vectors."""
        return self.norms == "fold"

    @property
    def device(self) -> torch.device:
        """Where scores are computed."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores: at least float32."""
        return torch.promote_types(self.target.dtype, torch.float32)

    @cached_property
    def _inverse_gram(self) -> Tensor:
        """(E^T E)^-1 of the source matrix; one product of this size serves all vectors."""
        identity = torch.eye(self.source.shape[1], dtype=torch.float64, device=self.source.device)
        return dual(identity, self.source).double()

    @cached_property
    def _source_mean(self) -> Tensor:
        return _mean_row(self.source)

    @cached_property
    def _target_mean(self) -> Tensor:
        return _mean_row(self.target)

    def for_reading(self, rows: Tensor) -> Tensor:
        """What to multiply the source matrix by, for vectors that read: (n, d_model)."""
        rows = rows.to(self.source.device)
        if self.inverse == "transpose":
            return rows.to(self.dtype)
        return (rows.double() @ self._inverse_gram).to(self.dtype)

    def read(self, rows: Tensor, tokens: Tensor | None = None, *, centred: bool = False) -> Tensor:
        """Scores of tokens for vectors that read the stream: (token, n).

        Centred scores are those of embeddings minus the mean embedding of the whole vocabulary,
        also where only some tokens are asked for.
        """
        mean = self._source_mean if centred else None
        return self._scores(self.source, mean, self.for_reading(rows), tokens)

    def written(
        self, rows: Tensor, tokens: Tensor | None = None, *, centred: bool = False
    ) -> Tensor:
        """Scores of tokens for vectors that write to the stream: (token, n)."""
        mean = self._target_mean if centred else None
        return self._scores(self.target, mean, rows.to(self.target.device, self.dtype), tokens)

    @torch.no_grad()
    def _scores(
        self, matrix: Tensor, mean: Tensor | None, rows: Tensor, tokens: Tensor | None
    ) -> Tensor:
        n = len(matrix) if tokens is None else len(tokens)
        scores = rows.new_empty(n, len(rows))
        for first in range(0, n, PIECE_ROWS):
            piece = slice(first, first + PIECE_ROWS)
            # In pieces: all of a bfloat16 matrix as float32 may be larger than the rest together.
            part = matrix[piece] if tokens is None else matrix[tokens[piece].to(matrix.device)]
            torch.mm(part.to(rows.dtype), rows.T, out=scores[piece])
        if mean is not None:
            scores -= (mean.to(rows.device) @ rows.double().T).to(rows.dtype)
        return scores.to(self.device)

    def about(self) -> dict[str, Any]:
        """The choices behind every score, as plain JSON types."""
        is_tied = self.source_name == "tied matrix"
        return {
            "model": self.transformer.identity.name,
            "norms": self.norms,
            "inverse": self.inverse,
            "read_through": self.source_name,
            "written_through": "tied matrix" if is_tied else "output matrix",
            "read_note": self.source_note,
        }

    def words(self) -> str:
        """The choices in one line."""
        inverse = {"transpose": "E transposed", "pseudo": "the pseudo-inverse of E"}[self.inverse]
        norms = {"skip": "norms left out", "fold": "norms folded in"}[self.norms]
        return f"tokens read through {inverse} ({self.source_name}), {norms}"


def _mean_row(matrix: Tensor) -> Tensor:
    """The mean embedding of the tokens that have one, float64."""
    total = torch.zeros(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for piece in matrix.split(PIECE_ROWS):
        total += piece.double().sum(0)
    return total / max(1, len(known_tokens(matrix)))
