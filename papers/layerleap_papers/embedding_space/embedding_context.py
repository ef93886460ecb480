"""What the sections of the study of embedding space share.

In: a model and settings. Out: a context with the output matrix, the blocks whose weights are
verified, the bank, and one pass over the held-out text; each is made when first used.
"""

import time
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from layerleap import ShortcutBank, Transformer
from layerleap.errors import BadText
from layerleap.models.weights import all_heads, feed_forwards, unembedding
from layerleap.stream import TextCounts
from layerleap.study import FitContext
from layerleap_papers.embedding_space.embedding_settings import EmbeddingSettings
from layerleap_papers.embedding_space.inner_products import Kept
from layerleap_papers.embedding_space.matches import Matches, match
from layerleap_papers.embedding_space.passes import Observed, observe
from layerleap_papers.embedding_space.tokens import READINGS


class Vectors(NamedTuple):
    """Whose vectors are compared, and how they are read."""

    model: Transformer
    matrix: Tensor  # its output matrix
    limit: int | None  # vectors of a layer, at most
    readings: tuple[str, ...]


class EmbeddingContext(FitContext[EmbeddingSettings]):
    """The output matrix, a bank, and what the held-out text activates."""

    @cached_property
    def matrix(self) -> Tensor:
        """The output matrix E in float32: (d_vocab, d_model)."""
        return unembedding(self.model).float()

    @property
    def own_vectors(self) -> Vectors:
        """The vectors of the model itself."""
        fold = self.settings.fold
        readings = tuple(name for name, (_, folds) in READINGS.items() if fold or not folds)
        return Vectors(self.model, self.matrix, self.settings.vectors, readings)

    @cached_property
    def kept(self) -> dict[str, Kept]:
        """Inner products of readings by set of vectors, as far as they have been measured."""
        return {}

    def generator(self, *numbers: int) -> torch.Generator:
        """Random numbers that depend on the seed of the study and on `numbers` alone."""
        seed = self.settings.seed
        for number in numbers:
            seed = 1_000_003 * seed + number + 1
        return torch.Generator().manual_seed(seed % 2**63)

    @cached_property
    def bank(self) -> ShortcutBank:
        """The bank given, or one fitted on the fitting side of the text."""
        given = self.settings.bank
        assert not isinstance(given, str)  # loaded in `resolved`
        bank = self.fit(self.text).bank if given is None else given
        return self.judged(bank, is_given=given is not None)

    @cached_property
    def observed(self) -> Observed:
        """One pass over the held-out text: active vectors, and top tokens of states."""
        started, text_counts = time.monotonic(), TextCounts()
        carries = "carried" in self.sections
        # Too little text to fit on fails the section that needs it, not this one.
        bank = self.attempt("Carried states", lambda: self.bank) if carries else None
        feed_forwards(self.model)  # one pass for all blocks, and two for heads
        all_heads(self.model)
        observed = observe(
            self.model,
            self.batches(text_counts=text_counts),
            bank,
            self.settings,
            generator=self.generator(0),
            progress=self.progress,
        )
        self.read("read", self.text, text_counts.to_dict(), started)
        return observed

    @cached_property
    def matches(self) -> Matches:
        """How many top tokens of states are found among those of the most active vectors."""
        observed = self.observed
        if len(observed.documents.unique()) < 2:
            raise BadText(
                f"{self.text!r} has fewer than two held-out documents; parameters chosen by other "
                "documents are the control, so give more text"
            )
        return match(
            self.model,
            self.matrix,
            observed,
            self.settings.state_k,
            generator=self.generator(1),
            progress=self.progress,
        )
