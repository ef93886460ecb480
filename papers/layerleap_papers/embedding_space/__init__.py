"""Do parameters read in the vocabulary mean anything?

In: a language model and a text. Out: a `StudyResult` with overlaps of paired parameters, active
parameters and states, inner products with few tokens kept, carried states and an untrained control,
after "Analyzing Transformers in Embedding Space" (arXiv 2209.02535).

Parameters are read without a forward pass. States are read on held-out text.
"""

from layerleap.study import Page, Study
from layerleap_papers.embedding_space import (
    active,
    columns,
    mapped_states,
    neurons,
    truncation,
    untrained_control,
)
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.embedding_settings import EmbeddingSettings

__all__ = ["STUDY", "EmbeddingSettings"]

PAGE = Page(__file__)
PARTS = (neurons, columns, active, truncation, mapped_states, untrained_control)
STUDY: Study[EmbeddingSettings] = PAGE.study(
    settings=EmbeddingSettings,
    context=EmbeddingContext,
    sections=tuple(part.SECTION for part in PARTS),
    boxes=(
        PAGE.box("transposed"),
        PAGE.box("inverse"),
        PAGE.box("linear", lambda result: bool(result.rows("carried"))),
    ),
)
