"""How well each layer predicts the model's output, through mat and through id: "scores", "lead"."""

from collections.abc import Iterator
from functools import partial

from layerleap import StudyResult, study
from layerleap.study import Page, pick
from layerleap_papers.jump_to_conclusions import curves
from layerleap_papers.jump_to_conclusions.curves import MAIN, PRECISIONS, both, curve, values
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

PAGE = Page(__file__)


def tables(context: ShortcutContext) -> study.Tables:
    """Scores of every lens on every text, and the lead of mat over id on the main text."""
    labels = ["-", *(label for label in context.banks if label != "tuned")]
    rows = []
    for text, reading in context.readings.items():
        rows += curves.score_rows(reading.scores, text, labels)
    return {"scores": rows, "lead": _lead(context)}


def _lead(context: ShortcutContext) -> list[study.Row]:
    """Mat minus id, paired by row."""
    scores = context.readings[context.text].scores
    mat, plain = (
        {f"precision@{k}": scores.rank[fit] < k for k in (1, 5, 10)}
        | {"surprisal": scores.surprisal[fit]}
        for fit in (context.text, "-")
    )
    leads = {metric: (mat[metric].double() - plain[metric].double())[:, :-1] for metric in mat}
    return [
        {"layer": layer, "metric": metric, **row}
        for metric, lead in leads.items()
        for layer, row in enumerate(curves.estimates(scores.documents, lead))
    ]


def findings(result: StudyResult) -> Iterator[study.Said]:
    """What the scores say."""
    last, half = result.model["n_layers"], curves.half_layers(result)
    third, middle = max(1, last // 3), last // 2
    sizes = {"last": last, "middle": middle}
    mat, plain = both(result, "precision@1")
    about = {"token": curves.token_of(result), "sample": sample(result), **sizes}
    yield PAGE.say("middle", mat=mat[middle], plain=plain[middle], **about)
    leads = [a - b for a, b in zip(mat[:last], plain[:last], strict=True)]
    widest = max(range(last), key=leads.__getitem__)
    points, ahead = 100 * leads[widest], sum(lead > 0 for lead in leads)
    yield PAGE.say("lead", ahead=ahead, widest=widest, points=points, last=last)
    yield PAGE.say("half", **half)
    for k in (1, 5, 10):
        ends: dict[str, float] = {}
        for name, shares in zip(("mat", "plain"), both(result, f"precision@{k}"), strict=True):
            ends |= {f"{name}_low": min(shares[:third]), f"{name}_high": max(shares[:third])}
        yield PAGE.say("precision", k=k, **ends)
    mat, plain = both(result, "surprisal")
    lower = sum(a < b for a, b in zip(mat[:last], plain[:last], strict=True))
    nats = {"mat": mat[middle], "plain": plain[middle]}
    yield PAGE.say("surprisal", lower=lower, floor=mat[last], **nats, **sizes)
    mat, plain = both(result, "kl")
    yield PAGE.say("kl", mat=mat[middle], plain=plain[middle], middle=middle)


def sample(result: StudyResult) -> str:
    """How much of the main text was read: "n = 3,000 texts of 27 documents"."""
    text = result.settings["text"]
    read = next(row for row in result.data if (row["role"], row["text"]) == ("read", text))
    states = "" if read["rows"] == read["texts"] else f"{read['rows']:,} states of "
    documents = "1 document" if read["documents"] == 1 else f"{read['documents']:,} documents"
    return f"n = {states}{read['texts']:,} texts of {documents}"


@PAGE.claim("more_often")
def _more_often(result: StudyResult) -> study.Tested:
    answers = {
        k: [study.above(row) for row in result.rows("lead", metric=f"precision@{k}")]
        for k in (1, 5, 10)
    }
    counts = ", ".join(f"{leads.count('yes')} (top {k})" for k, leads in answers.items())
    answer = study.at_every(lead for leads in answers.values() for lead in leads)
    return answer, {"n_layers": result.model["n_layers"], "counts": counts}


def _ends(rows: list[study.Row]) -> dict[str, float]:
    return {"least": min(values(rows)), "most": max(values(rows))}


@PAGE.claim("early_agreement")
def _early_agreement(result: StudyResult) -> study.Tested:
    mat = curves.below_last(result, curve(result, "mat", "precision@1"))
    early = mat[: max(1, round(len(mat) / 3))]
    answers = [study.between(row, 0.28, 0.45) for row in early]
    return study.all_of(answers), {"yes": answers.count("yes"), "n": len(early), **_ends(early)}


@PAGE.claim("wide_lead")
def _wide_lead(result: StudyResult) -> study.Tested:
    rows = result.rows("lead", metric="precision@1")
    rows = rows[: max(1, round(0.9 * len(rows)))]
    answers = [study.above(row, 0.2) for row in rows]
    points = {end: 100 * lead for end, lead in _ends(rows).items()}
    return study.at_every(answers), {"yes": answers.count("yes"), "n": len(rows), **points}


@PAGE.claim("blind_early")
def _blind_early(result: StudyResult) -> study.Tested:
    rows = curves.below_last(result, curve(result, "id", "precision@10"))
    early = rows[: max(1, round(0.4 * len(rows)))]
    return study.all_of(study.below(row, 0.05) for row in early), _ends(early)


@PAGE.claim("quarter")
def _quarter(result: StudyResult) -> study.Tested:
    mat = curves.below_last(result, curve(result, "mat", "precision@1"))
    later = mat[round(len(mat) / 8) :]
    answer = study.share_of((study.above(row, 0.25) for row in later), 1.0)
    return answer, {"layer": later[0]["layer"], "n": len(mat), **_ends(later)}


def _figure(key: str, *metrics: str, **more: str) -> study.Figure:
    rows = study.points(
        "scores",
        "tuned_scores",
        line="{map}",
        words={"metric": {metric: metric.capitalize() for metric in metrics}},
        metric=metrics,
        map=curves.MAPS,
        **MAIN,
        **more,
    )
    marks = {"marks": curves.floor} if key == "surprisal" else {}
    return PAGE.figure(key, rows, lines=curves.LENSES, **marks)


SHORT = {**{metric: metric.replace("precision", "P") for metric in curves.METRICS}, "kl": "KL"}


def _score_rows(result: StudyResult) -> Iterator[study.Row]:
    for row in pick("scores", "tuned_scores", metric=curves.METRICS[1:], map=curves.MAPS, **MAIN)(
        result
    ):
        yield {**row, "column": f"{SHORT[row['metric']]} {row['map']}"}
    for row in result.rows("r2", dst=result.model["n_layers"]):
        yield {**row, "layer": row["src"], "value": row["r2"], "column": f"R\u00b2 {row['map']}"}


SHOWS = (
    _more_often,
    PAGE.each("less_surprised", pick("lead", metric="surprisal"), study.below),
    _early_agreement,
    _wide_lead,
    PAGE.each(
        "ten_points",
        pick("lead", metric="precision@1"),
        partial(study.above, threshold=0.1),
        partial(study.share_of, needed=0.5),
    ),
    _blind_early,
    _quarter,
    _figure("precision", *PRECISIONS, panel="{metric}"),
)
SHOWS_AFTER_PAIRS = (
    _figure("surprisal", "surprisal"),
    _figure("kl", "kl"),
    PAGE.table(
        "agreement-table",
        pick("scores", "tuned_scores", metric="precision@1", map=curves.MAPS, **MAIN),
    ),
    PAGE.table(
        "scores-table",
        _score_rows,
        forms={f"{SHORT[m]} {n}": curves.IN_PERCENT for m in PRECISIONS for n in curves.MAPS},
    ),
)
