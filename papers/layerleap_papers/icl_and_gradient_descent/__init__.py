"""Does showing examples change a model as training would?

In: a decoder and tasks. Out: a `StudyResult` with accuracy in context, learning rates, similarities
by layer, changed predictions, and readings of layers, after "In-context Learning and Gradient
Descent Revisited" (arXiv 2311.07772).

Nothing is compared on a task that the model does not learn in context; its numbers are shown, and
marked. No weight of the model changes.
"""

from collections.abc import Iterator

from layerleap import StudyResult
from layerleap.study import Box, Study
from layerleap_papers.icl_and_gradient_descent import (
    changes,
    icl_accuracy,
    layers,
    rates,
    similarity,
)
from layerleap_papers.icl_and_gradient_descent.icl_context import IclContext, IclSettings
from layerleap_papers.icl_and_gradient_descent.rates import LOSSES

__all__ = ["STUDY", "IclSettings"]


def _about(result: StudyResult) -> Iterator[str]:
    yield (
        "A model that is shown solved examples gets better at solving the next one, without any "
        "training. It has been said that context works like gradient descent on these examples. "
        "This study shows the examples, trains on the same examples in the same order, and "
        "compares what each of the two changes inside the model."
    )
    yield (
        "Everything is measured at the token that predicts the answer, which is the last one of "
        "the prompt. A first token (BOS), if the tokenizer has one, is there in all conditions and "
        "is left out of what is compared. Every similarity has controls: a model with "
        "untrained blocks, isotropic noise, the change of another query, and training on shuffled "
        "answers. Predictions have the last two. A way of training counts for claims only if it "
        "learns the task at all."
    )
    yield (
        "Intervals are 95 %, over seeds and queries: each query of all seeds is left out once, and "
        "with two seeds or more an interval is at least as wide as Student's t-interval over the "
        "means of seeds."
    )
    yield (
        f"Training is on {LOSSES[result.settings['tokens']]}, with the rate that suits each way "
        "best."
        + (
            " The paper trains on all tokens of the demonstrations, with one rate for all ways."
            if result.settings["tokens"] != "all"
            else " The paper has one rate for all ways."
        )
    )


BOXES = (
    Box(
        "logit",
        "Layer-causal gradient descent",
        "Every block has its own loss: its output is read as if it were the last layer's. Nothing "
        "flows back from later blocks, as nothing does in context.",
    ),
    Box(
        "linear",
        "Through shortcuts",
        "The same, but a block's output is first mapped to the last layer by a linear map that "
        "was fitted on other text, which reads it far better.",
        lambda result: len(result.settings["lenses"]) > 1,
    ),
)


STUDY = Study(
    name="icl",
    title="In-context learning and gradient descent in {model}",
    help="Does showing examples change a model as training on them would?\n\n"
    "Does in-context learning work here at all? Do plain and layer-causal gradient descent on the "
    "same demonstrations change attention as context does? Do models with untrained blocks show "
    "the same? Are shortcuts and tuned maps a better loss for each layer than the logit lens? "
    "Every number has a control.",
    method=5,
    settings=IclSettings,
    context=IclContext,
    sections=(
        icl_accuracy.SECTION,
        rates.SECTION,
        rates.LEARNS,
        similarity.SECTION,
        changes.SECTION,
        layers.SECTION,
        similarity.SHOTS,
    ),
    paper="Deutch, Magar, Bar Natan and Dar, \u201cIn-context Learning and Gradient Descent "
    "Revisited\u201d (NAACL 2024).",
    about=_about,
    boxes=BOXES,
)
