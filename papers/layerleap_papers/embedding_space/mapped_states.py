"""Do states that a linear shortcut carries to the last layer say more of what is active?

In: the same pass over held-out text, and a bank. Out: R_k and inner products of carried states
beside those of the states themselves; and the section of the study that shows them.
"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.errors import BadSettings, BadText
from layerleap.study import Page, above, all_of, at_every, in_words, pick, points, untested
from layerleap_papers.embedding_space import truncation
from layerleap_papers.embedding_space.active import GAIN, LEAD, PANELS, in_percent, share_rows
from layerleap_papers.embedding_space.embedding_context import EmbeddingContext
from layerleap_papers.embedding_space.inner_products import INVERSES
from layerleap_papers.embedding_space.passes import BY_SIZE, WAYS

PAGE = Page(__file__)
CARRIED = "carried states"


def _run(context: EmbeddingContext) -> study.Tables:
    _ = context.bank  # says why if there is none
    rows = share_rows(context.matches, "raw", "linear", below=context.model.n_layers)
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
    gains = [
        row
        for n, inverse in enumerate(INVERSES)
        for row in mat.interval_rows(
            mat.value[n] - raw.value[n], mat.left_out[:, n] - raw.left_out[:, n], inverse
        )
    ]
    both = ((truncation.STATES, raw), (CARRIED, mat))
    return {
        "carried_kept": [{"of": name, **row} for name, kept in both for row in kept.rows()],
        "carried_kept_gain": gains,
        "carried_crossings": [{"of": CARRIED, **mat.crossing()}],
    }


@PAGE.claim("better")
def _better(result: StudyResult) -> study.Tested:
    mean = result.row("carried", layer=None, way=BY_SIZE, measure=GAIN)
    if mean is None:
        return untested("FFN values, or their activity, are not verified in any layer")
    gains = result.rows("carried", way=BY_SIZE, measure=GAIN, layer=study.KNOWN)
    answers = [above(row) for row in gains]
    counts = {"yes": answers.count("yes"), "n": len(answers), "no": answers.count("no")}
    return at_every(answers), {"gain": in_percent(mean), **counts}


@PAGE.claim("keeps")
def _keeps(result: StudyResult) -> study.Tested:
    rows = result.rows("carried_kept_gain", inverse="transposed")
    if not rows:
        return untested("the output matrix has no right inverse; see the notes")
    few = [row for row in rows if row["k"] <= 1024] or rows[:1]
    gains = ", ".join(f"{in_words(row, '+.2f')} with {row['k']:,}" for row in few)
    return all_of(above(row) for row in few), {"gains": gains}


def _findings(result: StudyResult) -> Iterator[study.Said]:
    for way in WAYS:
        gain, mat, raw = (
            result.row("carried", layer=None, way=way, state=state, measure=measure)
            for state, measure in (("linear", GAIN), ("linear", LEAD), ("raw", LEAD))
        )
        if gain and mat and raw:
            leads = {"mat": in_percent(mat), "raw": in_percent(raw), "gain": in_percent(gain)}
            yield PAGE.say("carried_values" if way == BY_SIZE else "carried", way=way, **leads)
    for row in result.rows("carried_crossings"):
        few = result.rows("carried_kept", of=CARRIED, inverse="lead")[0]
        yield PAGE.say("carried_crossing", curves=truncation.crossing_words(row, few))


SECTION = PAGE.section(
    "carried",
    _run,
    findings=_findings,
    shows=(
        _better,
        _keeps,
        PAGE.figure(
            "carried",
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
        ),
        PAGE.figure(
            "carried-kept",
            points(
                "carried_kept",
                x="k",
                line="{of}",
                panel="{inverse}",
                words={
                    "of": {CARRIED: "linear", truncation.STATES: "logit"},
                    "inverse": {name: name.capitalize() for name in INVERSES},
                },
                inverse=set(INVERSES),
            ),
        ),
        PAGE.table("carried-table", pick("carried", way=WAYS, measure=GAIN, layer=study.KNOWN)),
    ),
)
