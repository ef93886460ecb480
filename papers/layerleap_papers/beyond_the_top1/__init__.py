"""Do ranks saturate in order?

In: a model and a text, images or speech. Out: a `StudyResult` with order, guesses, tasks, the
intervention, exits and the untrained twin, after "Looking Beyond the Top-1" (arXiv 2410.20210).

Maps are fitted on one side of the text, and everything else is read from the other.
"""

from collections.abc import Iterator

from layerleap import StudyResult
from layerleap.study import Box, Study
from layerleap_papers.beyond_the_top1 import (
    exits,
    guesses,
    intervention,
    order,
    probe,
    untrained_control,
)
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext
from layerleap_papers.beyond_the_top1.saturation_settings import SaturationSettings

__all__ = ["STUDY", "SaturationSettings"]

KINDS = {
    "images": "An image counts as a document with one position, where its class is read. Ranks are "
    "those of the {d_vocab} classes.",
    "sound": "The model hears a recording and is given its transcript token by token. The "
    "positions of a recording are those where the next token of the transcript follows.",
}


def _about(result: StudyResult) -> Iterator[str]:
    last = result.model["n_layers"]
    yield (
        f"A model's prediction takes shape over its {last} layers. Read every layer as if it were "
        "the last, and sort the tokens by their logits. The saturation layer of a rank is the "
        "layer from which on the token at that rank no longer changes. Layer 0 means that it never "
        f"changed. Layer {last} means that only the last block put it there: the rank does not "
        "saturate."
    )
    if result.model["reads"] in KINDS:
        yield KINDS[result.model["reads"]].format(**result.model)
    yield (
        "Many effects here appear even where there is nothing to find. So every number stands next "
        "to what chance, or the definition alone, would give. The documentation explains how each "
        "null is made."
    )


BOXES = (
    Box("logit", "id, the logit lens", "The state of a layer is read as it is. Nothing is fitted."),
    Box(
        "linear",
        "mat, the linear shortcut",
        "One matrix per layer, fitted by least squares on other documents, predicts the last "
        "state; the model's own head reads the prediction.",
        lambda result: bool(result.row("order", lens="linear")),
    ),
)


STUDY = Study(
    name="saturation",
    method=2,
    title="Saturation in {model}, read on {text}",
    help="Ask whether ranks saturate in order, and write one report.\n\n"
    "From which layer on does each of the best tokens keep its rank? Do ranks saturate in order, "
    "beyond chance and beyond a random walk? Can the rank that is being decided be read off a "
    "state? Does a saturated state stay saturated in another text? Does exiting by that save more "
    "than other rules? Works on text, images and speech.",
    settings=SaturationSettings,
    context=SaturationContext,
    sections=(
        order.SECTION,
        guesses.SECTION,
        probe.SECTION,
        intervention.SECTION,
        untrained_control.SECTION,
        exits.SECTION,
    ),
    paper="Lioubashevski, Schlank, Stanovsky and Goldstein, \u201cLooking Beyond the Top-1\u201d "
    "(ICML 2025).",
    about=_about,
    boxes=BOXES,
)
