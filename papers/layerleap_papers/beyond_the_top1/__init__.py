"""Do ranks saturate in order?

In: a model and a text, images or speech. Out: a `StudyResult` with order, guesses, tasks, the
intervention, exits and an untrained control, after "Looking Beyond the Top-1" (arXiv 2410.20210).

Maps are fitted on one side of the text, and everything else is read from the other.
"""

from layerleap.study import Page, Study
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

PAGE = Page(__file__)
PARTS = (order, guesses, probe, intervention, untrained_control, exits)

STUDY: Study[SaturationSettings] = PAGE.study(
    settings=SaturationSettings,
    context=SaturationContext,
    sections=tuple(part.SECTION for part in PARTS),
    boxes=(
        PAGE.box("logit"),
        PAGE.box("linear", lambda result: bool(result.row("order", lens="linear"))),
    ),
)
