"""Do parameters read in the vocabulary mean anything?

In: a language model and a text. Out: a `StudyResult` with overlaps of paired parameters, active
parameters and states, inner products with few tokens kept, carried states and the untrained twin,
after "Analyzing Transformers in Embedding Space" (arXiv 2209.02535).

Parameters are read without a forward pass. States are read on held-out text.
"""

from collections.abc import Iterator

from layerleap import StudyResult
from layerleap.study import Box, Study
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


def _about(result: StudyResult) -> Iterator[str]:
    yield (
        "The output matrix E turns the last state into logits. It can turn any vector that reads "
        "the residual stream or writes to it into scores of tokens, without running the model: the "
        "keys and values of neurons, and the columns of attention's matrices. The tokens with the "
        "highest scores often look meaningful. This study asks what can be measured of that."
    )
    yield (
        "Every number has a control: vectors that do not belong together, parameters "
        "that other documents made active, or a model with random weights. E is the output matrix "
        "throughout, also where the model has another one for its input, and biases are left out. "
        "Intervals are over vectors of a layer, or over documents where text is read."
    )


BOXES = (
    Box(
        "transposed",
        "The transposed matrix",
        "The score of a token is the inner product of the vector with the token's row of E.",
    ),
    Box(
        "inverse",
        "The pseudo-inverse",
        "Scores that give back every inner product exactly if all tokens are kept.",
    ),
    Box(
        "linear",
        "mat, the linear shortcut",
        "One matrix per layer, fitted by least squares on other documents, predicts the last "
        "state from an earlier one.",
        lambda result: bool(result.rows("carried")),
    ),
)


STUDY = Study(
    name="embedding",
    title="{model} in embedding space, read on {text}",
    help="Do parameters that are read in the vocabulary mean anything?\n\n"
    "Do the key and the value of a neuron name the same tokens, more than shuffled pairs? Do "
    "paired columns of a head? Are a state's top tokens those of the parameters most active "
    "there? How few tokens can stand for a vector, and with which inverse of the output matrix? "
    "Every number has a control.",
    method=4,
    settings=EmbeddingSettings,
    context=EmbeddingContext,
    sections=(
        neurons.SECTION,
        columns.SECTION,
        active.SECTION,
        truncation.SECTION,
        mapped_states.SECTION,
        untrained_control.SECTION,
    ),
    paper="Dar, Geva, Gupta and Berant, \u201cAnalyzing Transformers in Embedding Space\u201d "
    "(ACL 2023).",
    about=_about,
    boxes=BOXES,
)
