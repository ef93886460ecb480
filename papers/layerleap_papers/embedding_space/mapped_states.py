"""Do states that a linear shortcut carries to the last layer say more of what is active?

In: the same pass over held-out text, and a bank. Out: R_k and inner products of carried states
beside those of the states themselves; and the section of the study that shows them.
"""

from collections.abc import Iterator

from torch import Tensor

from layerleap import StudyResult, study
from layerleap.errors import BadSettings, BadText
from layerleap.study import above, all_of, at_every, estimate, pick, points, untested
from layerleap_papers.embedding_space import truncation
from layerleap_papers.embedding_space.active import LEAD, PANELS, in_points, layer_rows
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.inner_products import INVERSES
from layerleap_papers.embedding_space.matches import OTHERS, OWN
from layerleap_papers.embedding_space.pairs import interval
from layerleap_papers.embedding_space.passes import BY_SIZE, WAYS

GAIN = "gain"  # lead of carried states minus lead of states as they are
CARRIED = "carried states"
LINE_OF = {CARRIED: "linear", truncation.STATES: "logit"}


def _run(context: EmbeddingContext) -> study.Tables:
    _ = context.bank  # says why if there is none
    matches, last = context.matches, context.model.n_layers
    rows: list[study.Row] = []
    for way in dict.fromkeys(way for way, _ in matches.places):
        blocks = [block for each, block in matches.places if each == way and block < last]
        if not blocks:
            continue
        columns: dict[tuple[str, str], dict[int, Tensor]] = {}
        for state in ("raw", "linear"):
            for source in (OWN, OTHERS):
                columns[state, source] = {b: matches.shares[way, b, state, source] for b in blocks}
            columns[state, LEAD] = {b: matches.lead(way, b, state) for b in blocks}
        columns["linear", GAIN] = {
            b: columns["linear", LEAD][b] - columns["raw", LEAD][b] for b in blocks
        }
        rows += layer_rows(matches, columns, way=way)
    if not rows:
        raise BadText("the model has one layer, so there is nothing to carry states over")
    return {"carried": rows, **_inner_products(context)}


def _inner_products(context: EmbeddingContext) -> study.Tables:
    """Of carried states, and what they have more than the states themselves."""
    try:
        raw = truncation.kept_of(context, truncation.STATES, *truncation.states_of(context))
        mat = truncation.kept_of(context, CARRIED, *truncation.states_of(context, carried=True))
    except BadSettings as error:  # no right inverse
        context.leave_out("Inner products of carried states", error)
        return {}
    both = ((truncation.STATES, raw), (CARRIED, mat))
    gains = [
        row
        for n, inverse in enumerate(INVERSES)
        for row in mat.interval_rows(
            mat.value[n] - raw.value[n], mat.left_out[:, n] - raw.left_out[:, n], inverse
        )
    ]
    return {
        "carried_kept": [{"of": name, **row} for name, each in both for row in each.rows()],
        "carried_kept_gain": gains,
        "carried_crossings": [{"of": CARRIED, **mat.crossing()}],
    }


def _mean(result: StudyResult, **where: str) -> study.Row | None:
    return result.row("carried", layer=None, **where)


# --- claims, findings, figures and tables ------------------------------------------------------


@study.claim(
    "Tokens of carried states match the most active FFN values better than those of "
    "states as they are, beyond chance, in every layer."
)
def _better(result: StudyResult) -> study.Verdict:
    gains = result.rows("carried", way=BY_SIZE, measure=GAIN, layer=study.KNOWN)
    mean = _mean(result, way=BY_SIZE, measure=GAIN)
    if mean is None:
        return untested("FFN values, or their activity, are not verified in any layer")
    given = [above(row) for row in gains]
    return study.Verdict(
        at_every(given),
        f"mean gain over layers {in_points(mean)}; clearly above 0 at {given.count('yes')} of "
        f"{len(given)} layers, clearly below at {given.count('no')}",
        "yes if the interval of (carried minus control) minus (as it is minus control) is above 0 "
        "at every layer, partly if at most of them",
    )


@study.claim(
    "Few tokens keep more of the inner products of carried states than of states as they are."
)
def _keeps(result: StudyResult) -> study.Verdict:
    rows = result.rows("carried_kept_gain", inverse="transposed")
    if not rows:
        return untested("the output matrix has no right inverse; see the notes")
    few = [row for row in rows if row["k"] <= 1024] or rows[:1]
    seen = ", ".join(f"{interval(row, '{:+.2f}')} with {row['k']:,}" for row in few)
    return study.Verdict(
        all_of(above(row) for row in few),
        f"gain in cosine with the transposed matrix: {seen} tokens",
        "yes if the intervals for all k up to 1,024 are above 0, partly if those of some",
    )


def _findings(result: StudyResult) -> Iterator[study.Finding]:
    for way in WAYS:
        gain = _mean(result, way=way, measure=GAIN)
        leads = [_mean(result, way=way, state=state, measure=LEAD) for state in ("linear", "raw")]
        if gain is None or None in leads:
            continue
        mat, raw = (in_points(row) for row in leads if row is not None)
        yield study.Finding(
            f"Top tokens of carried states are found among those of the most active {way} with a "
            f"lead of {mat} over other documents, those of states as they are with {raw}: a gain "
            f"of {in_points(gain)} (mean over layers below the last).",
            under="carried",
            headline=way == BY_SIZE,
        )
    for row in result.rows("carried_crossings"):
        few = result.rows("carried_kept", of=CARRIED, inverse="lead")[0]
        yield study.Finding(
            f"The curves of carried states {truncation.crossing_words(row, few)}.",
            under="carried-kept",
        )


LINES = {
    "linear": study.Line("carried (mat)", study.LENSES["linear"].colour),
    "logit": study.Line("as it is", study.LENSES["logit"].colour, "s", "dashed"),
}
SECTION = study.Section(
    "carried",
    "Do carried states say more of it?",
    _run,
    "A linear shortcut carries a state to the last layer. Are the top tokens of carried states "
    "found among those of active parameters more often than the top tokens of the states as they "
    "are? Both are compared with parameters that other documents made active, because carried "
    "states may name frequent tokens. Then inner products with k tokens kept, for the same states.",
    help="states carried by shortcuts",
    findings=_findings,
    shows=(
        _better,
        _keeps,
        study.Figure(
            "carried",
            "Carried states and active parameters",
            "Share of a state's top tokens found among those of active parameters, minus the share "
            "found among those of other documents.",
            points(
                "carried",
                line="{state}",
                panel="{way}",
                words={"way": PANELS, "state": {"raw": "logit"}},
                way=WAYS,
                state=("raw", "linear"),
                measure=LEAD,
                layer=study.KNOWN,
            ),
            y=study.Axis("lead (share of tokens)", "share", low=None, high=None),
            size=(3.6, 3.4),
            share_y=False,
            lines=LINES,
        ),
        study.Figure(
            "carried-kept",
            "Inner products of carried states with k tokens kept",
            "Cosine of the inner products of all pairs of states with those of their readings.",
            points(
                "carried_kept",
                x="k",
                line="{of}",
                panel="{inverse}",
                words={"of": LINE_OF, "inverse": {name: name.capitalize() for name in INVERSES}},
                inverse=set(INVERSES),
            ),
            x=study.Axis("tokens kept", "log"),
            y=study.Axis("cosine"),
            lines=LINES,
            unit="states",
            size=(4.6, 3.6),
            sample="bands: 95 %, over states",
        ),
        study.Table(
            "carried-table",
            "Gain of carried states over states as they are (points), by layer",
            pick("carried", way=WAYS, measure=GAIN, layer=study.KNOWN),
            (study.Column("layer"),),
            across="way",
            cells=(estimate("value", "", "{:+.1f}", 100),),
            dense=True,
        ),
    ),
)
