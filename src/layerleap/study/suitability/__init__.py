"""Is early exit worth it for this model, on this text, on this machine?

In: a model of plain text, or an image classifier. Out: a `StudyResult` whose headlines give the
answer with its reasons, and the plan to decode with (`plan_of`).

One pass over the fitting side of the text gives the maps, one over its held-out side all the rest:
rules are replayed, and their time is added up from measured blocks, heads and maps.
"""

from collections.abc import Iterator

from layerleap.study.engine import Box, Study
from layerleap.study.result import StudyResult
from layerleap.study.suitability import measured, plans
from layerleap.study.suitability.chosen_plan import answer_of, plan_of
from layerleap.study.suitability.suitability_context import SuitabilityContext
from layerleap.study.suitability.suitability_settings import SuitabilitySettings
from layerleap.study.tables import percent

__all__ = ["STUDY", "SuitabilitySettings", "answer_of", "plan_of"]


def _about(result: StudyResult) -> Iterator[str]:
    tolerance, delta = result.settings["tolerance"], result.settings["delta"]
    yield (
        "A model often knows its answer layers before the last. A rule looks at what a layer would "
        "say and stops when it is sure enough. That saves the layers above, but every look runs "
        "the output head, which may cost as much as many layers. So where to look matters as much "
        "as when to stop."
    )
    yield (
        f"Thresholds are set such that, with confidence {1 - delta:g}, at most "
        f"{percent(tolerance)} of answers differ from the full model's. Held-out documents are "
        "split: a third trains learned rules and chooses the plan, and rows of the others "
        "calibrate its threshold and verify it. None was fitted on. Whether a plan saves time is "
        "decided by the whole 95 % interval of its time on this machine."
    )


BOXES = (
    Box("linear", "linear shortcut", "A state is carried to the last layer by one matrix."),
    Box("logit", "logit lens", "A state is read by the output head as it is."),
)


STUDY: Study[SuitabilitySettings] = Study(
    name="suitability",
    title="Is early exit worth it for {model}, on {text}?",
    help="""Is early exit worth it for this model, on this text, on this machine?

    Shows agreement by layer, what calibrated rules save in layers, FLOPs and measured time, where
    it is best to check, and an answer with its reasons. The report has the fastest plan that keeps
    the tolerance as plan.json, for `layerleap generate MODEL PROMPT --exit report/plan.json`. If it
    is interrupted, the same command continues where it stopped.

    A stricter guarantee: layerleap study suitability smollm2 --tolerance 0.02 --read-texts 3000""",
    settings=SuitabilitySettings,
    context=SuitabilityContext,
    sections=(measured.TIMES, measured.AGREEMENT, plans.SECTION),
    about=_about,
    boxes=BOXES,
)
