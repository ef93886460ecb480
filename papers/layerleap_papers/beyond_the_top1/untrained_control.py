"""The same model with random weights: what it shows too was not learned.

In: the text, read by the untrained control. Out: its order of saturation, and the intervention if
that was made in the model itself.
"""

from collections.abc import Iterator
from functools import partial

from layerleap import StudyResult, study
from layerleap.study import Page, untested
from layerleap_papers.beyond_the_top1 import intervention, order
from layerleap_papers.beyond_the_top1.saturation_context import SaturationContext

PAGE = Page(__file__)


def _run(context: SaturationContext) -> study.Tables:
    data, where = context.untrained_control(), " in the untrained twin"
    tables = order.tables_of(context, data, where)
    if "intervention" in context.sections:
        make = partial(intervention.tables_of, context, data, intervention.UNTRAINED)
        tables |= context.attempt(f"The intervention{where}", make) or {}
    return {f"twin_{name}": rows for name, rows in tables.items()}


def _findings(result: StudyResult) -> Iterator[study.Said]:
    yield PAGE.say("untrained", share=1 - result.rows("twin_ranks")[0]["never"])
    yield f"In the untrained twin: {order.steps_words(result.rows('twin_steps'))}"
    selections = result.rows("twin_tau")
    for tau in selections:
        yield f"In the untrained twin: {order.tau_words(tau)}"
    if selections:
        yield PAGE.say("untrained_order", selections=order.headline(selections))


@PAGE.claim("untrained")
def _claim(result: StudyResult) -> study.Tested:
    if not result.rows("twin_tau"):
        return untested("too few ranks saturate in the untrained twin")
    return order.only_first_three(result.rows("twin_steps"))


SECTION = PAGE.section(
    "twin",
    _run,
    findings=_findings,
    shows=(_claim, PAGE.table("twin-table", partial(order.rank_rows, prefix="twin_"))),
)
