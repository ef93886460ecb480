"""The same model with random weights: what it shows too was not learned.

In: the text, read by the untrained twin. Out: its order of saturation, and the intervention if that
was made in the model itself.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.study import untested
from layerleap_papers.beyond_the_top1 import intervention, order
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext


def _run(context: SaturationContext) -> study.Tables:
    data, where = context.untrained_control(), " in the untrained twin"
    tables = order.tables_of(context, data, where)
    if "intervention" in context.sections:
        tables |= (
            context.attempt(
                f"The intervention{where}",
                lambda: intervention.tables_of(context, data, intervention.UNTRAINED),
            )
            or {}
        )
    return {f"twin_{name}": rows for name, rows in tables.items()}


def _findings(result: StudyResult) -> Iterator[study.Said]:
    first = result.rows("twin_ranks")[0]
    yield (
        f"In the same model with random weights, {1 - first['never']:.0%} of top tokens saturate "
        "before the last block."
    )
    yield (f"In the untrained twin: {order.steps_words(result.rows('twin_steps'))}")
    selections = result.rows("twin_tau")
    for tau in selections:
        yield (f"In the untrained twin: {order.tau_words(tau)}")
    if selections:
        yield study.Headline(f"In the untrained twin, {order.headline(selections)}.")


@study.claim("In untrained models, only the first three ranks saturate in order.")
def _claim(result: StudyResult) -> study.Verdict:
    if not result.rows("twin_tau"):
        return untested("too few ranks saturate in the untrained twin")
    return order.only_first_three(result.rows("twin_steps"))


SECTION = study.Section(
    "twin",
    "The same model, untrained",
    _run,
    "What shows in a model of the same architecture with random weights does not come from "
    "training. Its order is compared with the nulls in the figure above, and its states are "
    "patched into other texts as the model's are.",
    short="Untrained",
    help="the same model with random weights",
    findings=_findings,
    after=("intervention",),
    quick=False,
    shows=(
        _claim,
        order.rank_table("twin-table", "Where each rank saturates in the untrained twin", "twin_"),
    ),
)
