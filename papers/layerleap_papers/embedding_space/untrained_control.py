"""The same model with random weights: overlaps that it shows too were not learned.

In: the untrained twin. Out: the overlaps of its keys and values and of its columns.
"""

from collections.abc import Iterator

from layerleap import LayerleapError, StudyResult, study, untrained
from layerleap.models.weights import unembedding
from layerleap.study import all_of, between, estimate, untested
from layerleap_papers.embedding_space import columns, neurons
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.pairs import interval, lead_over

SHARE = 0.1  # of the trained model's lead: a smaller one counts as none
LEADS = {"neurons": neurons.LEAD, "columns": lead_over(columns.LAYER)}


def _run(context: EmbeddingContext) -> study.Tables:
    control = untrained(context.model, seed=context.settings.seed)
    matrix, limit = unembedding(control).float(), context.settings.control_vectors
    tables: study.Tables = {}
    errors: list[LayerleapError] = []
    for part in (neurons, columns):
        try:
            tables |= part.tables_of(context, control, matrix, limit, ("plain",))
        except LayerleapError as error:
            errors.append(error)
    if not tables:
        raise errors[0]
    for reason in errors:
        context.leave_out("Part of the untrained twin", reason)
    return {f"twin_{name}": rows for name, rows in tables.items()}


def _compared(result: StudyResult) -> Iterator[tuple[study.Row, study.Row]]:
    """Mean leads over layers: of the control, and of the model itself."""
    for table, measure in LEADS.items():
        where = {"measure": measure, "over": "mean", "reading": "plain"}
        for row in result.rows(f"twin_{table}_depth", **where):
            trained = result.row(f"{table}_depth", pair=row["pair"], **where)
            if trained is not None:
                yield row, trained


def _is_chance(control: study.Row, trained: study.Row) -> study.Answer:
    """Is the twin's lead within a tenth of the trained model's, on both sides of 0?"""
    margin = SHARE * trained["value"]
    return between(control, -margin, margin) if trained["low"] > 0 else "cannot tell"


@study.claim("In an untrained model, vectors that belong together overlap no more than others.")
def _claim(result: StudyResult) -> study.Verdict:
    pairs = list(_compared(result))
    if not pairs:
        return untested("the model's own overlaps were not measured in this run")
    seen = "; ".join(
        f"{_name(control)}: {interval(control, '{:+.5f}')} untrained, "
        f"{interval(trained, '{:+.5f}')} trained"
        for control, trained in pairs
    )
    return study.Verdict(
        all_of(_is_chance(*pair) for pair in pairs),
        f"mean lead over layers, {seen}",
        "yes if the intervals of all of the twin's leads are within a tenth of the trained model's "
        "lead on both sides of 0, partly if those of some; undecided where the trained model has "
        "no clear lead",
    )


def _name(row: study.Row) -> str:
    pair: str = row["pair"]
    return neurons.NAMES.get(pair, pair)


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for control, trained in _compared(result):
        yield (
            f"{_name(control)[0].upper()}{_name(control)[1:]} in the untrained twin: the mean lead "
            f"over the control is {interval(control, '{:+.5f}')}, in the model itself "
            f"{interval(trained, '{:+.5f}')}."
        )


def _rows(result: StudyResult) -> Iterator[study.Row]:
    for control, trained in _compared(result):
        for model, row in (("trained", trained), ("untrained", control)):
            yield {**row, "name": _name(row), "model": model}


SECTION = study.Section(
    "twin",
    "The same model, untrained",
    _run,
    "In a model of the same architecture with random weights, vectors that belong together share "
    "no more tokens than others do. If they did, the overlaps above would come from the method and "
    "not from training.",
    short="Untrained",
    help="the same model with random weights",
    findings=_findings,
    after=("neurons", "columns"),
    quick=False,
    shows=(
        _claim,
        study.Table(
            "twin-table",
            "Mean lead over the control, times 1,000",
            _rows,
            (
                study.Column("name", "pairs"),
                study.Column("model"),
                estimate("value", "lead", "{:.2f}", 1000),
                study.Column("rows", "vectors", "{:,.0f}"),
            ),
        ),
    ),
)
