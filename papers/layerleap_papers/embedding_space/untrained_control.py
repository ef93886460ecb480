"""The same model with random weights: overlaps that it shows too were not learned.

In: the untrained control. Out: the overlaps of its keys and values and of its columns.
"""

from collections.abc import Iterator

from layerleap import LayerleapError, StudyResult, study, untrained
from layerleap.models.weights import unembedding
from layerleap.study import Page, all_of, between, in_words, untested
from layerleap_papers.embedding_space import columns, neurons
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext, Vectors
from layerleap_papers.embedding_space.overlaps import lead_over, mean_of

PAGE = Page(__file__)
SHARE = 0.1  # of the trained model's lead: a smaller one counts as none
LEADS = {"neurons": neurons.LEAD, "columns": lead_over(columns.LAYER)}


def _run(context: EmbeddingContext) -> study.Tables:
    control = untrained(context.model, seed=context.settings.seed)
    limit = context.settings.control_vectors
    vectors = Vectors(control, unembedding(control).float(), limit, ("plain",))
    tables: study.Tables = {}
    errors: list[LayerleapError] = []
    for part in (neurons, columns):
        try:
            tables |= part.tables_of(context, vectors)
        except LayerleapError as error:
            errors.append(error)
    if not tables:
        raise errors[0]
    for reason in errors:
        context.leave_out("Part of the untrained twin", reason)
    return {f"twin_{name}": rows for name, rows in tables.items()}


def _compared(result: StudyResult) -> Iterator[tuple[str, study.Row, study.Row]]:
    """Names of pairs, and their mean leads over layers: of the control, and of the model itself."""
    for table, measure in LEADS.items():
        for row in result.rows(f"twin_{table}_depth", measure=measure, over="mean"):
            trained = mean_of(result, f"{table}_depth", pair=row["pair"], measure=measure)
            if trained is not None:
                pair: str = row["pair"]
                yield neurons.NAMES.get(pair, pair), row, trained


def _is_chance(control: study.Row, trained: study.Row) -> study.Answer:
    """Is the control's lead within a tenth of the trained model's, on both sides of 0?"""
    margin = SHARE * trained["value"]
    return between(control, -margin, margin) if trained["low"] > 0 else "cannot tell"


@PAGE.claim("untrained")
def _claim(result: StudyResult) -> study.Tested:
    compared = list(_compared(result))
    if not compared:
        return untested("the model's own overlaps were not measured in this run")
    leads = "; ".join(
        f"{name}: {in_words(control, '+.5f')} untrained, {in_words(trained, '+.5f')} trained"
        for name, control, trained in compared
    )
    return all_of(_is_chance(*rows) for _, *rows in compared), {"leads": leads}


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for name, control, trained in _compared(result):
        name = f"{name[0].upper()}{name[1:]}"
        yield PAGE.say("untrained", name=name, control=control, trained=trained)


def _rows(result: StudyResult) -> Iterator[study.Row]:
    for name, control, trained in _compared(result):
        yield {**trained, "name": name, "model": "trained"}
        yield {**control, "name": name, "model": "untrained"}


SECTION = PAGE.section(
    "twin", _run, findings=_findings, shows=(_claim, PAGE.table("twin-table", _rows))
)
