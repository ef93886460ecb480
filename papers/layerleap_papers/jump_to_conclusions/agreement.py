"""How well each layer predicts the model's output, through mat and through id: "scores", "lead"."""

from collections.abc import Iterator
from functools import partial

from layerleap import StudyResult, study
from layerleap.study import percent
from layerleap_papers.jump_to_conclusions import curves
from layerleap_papers.jump_to_conclusions.curves import (
    METRICS,
    PRECISIONS,
    below_last,
    both,
    curve,
    values,
)
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

EVERY_LAYER = "yes if the interval of the lead says so at every layer, partly if at most of them"


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
        {
            **{f"precision@{k}": scores.rank[fit] < k for k in (1, 5, 10)},
            "surprisal": scores.surprisal[fit],
        }
        for fit in (context.text, "-")
    )
    return [
        {"layer": layer, "metric": metric, **row}
        for metric in mat
        for layer, row in enumerate(
            curves.estimates(
                scores.documents, (mat[metric].double() - plain[metric].double())[:, :-1]
            )
        )
    ]


def findings(result: StudyResult) -> Iterator[study.Finding]:
    """What the scores say."""
    yield from _headlines(result)
    last = result.model["n_layers"]
    third, middle = max(1, last // 3), last // 2
    for k in (1, 5, 10):
        mat, plain = (own[:third] for own in both(result, f"precision@{k}"))
        yield study.Finding(
            f"Over the first third of the layers, Precision@{k} is between {percent(min(mat))} and "
            f"{percent(max(mat))} with shortcuts, and between {percent(min(plain))} and "
            f"{percent(max(plain))} with the logit lens.",
            under="precision",
        )
    mat, plain = both(result, "surprisal")
    lower = sum(a < b for a, b in zip(mat[:last], plain[:last], strict=True))
    yield study.Finding(
        f"The model is less surprised by the shortcut's token than by the logit lens's token at "
        f"{lower} of {last} layers below the last. At layer {middle} the surprisal is "
        f"{mat[middle]:.1f} against {plain[middle]:.1f} nats; at the last layer it is "
        f"{mat[last]:.2f} nats.",
        under="surprisal",
    )
    mat, plain = both(result, "kl")
    yield study.Finding(
        f"At layer {middle}, the KL divergence from the model is {mat[middle]:.1f} nats for the "
        f"shortcut and {plain[middle]:.1f} nats for the logit lens.",
        under="kl",
    )


def _headlines(result: StudyResult) -> Iterator[study.Finding]:
    last, half = result.model["n_layers"], curves.half_layers(result)
    mat, plain = both(result, "precision@1")
    middle = last // 2
    yield study.Finding(
        f"After {middle} of {last} layers, a linear shortcut predicts the model's "
        f"{curves.token_of(result)} in {percent(mat[middle])} of cases, the logit lens in "
        f"{percent(plain[middle])} (held-out documents, {sample(result)}).",
        headline=True,
    )
    lead = [a - b for a, b in zip(mat[:last], plain[:last], strict=True)]
    widest = max(range(last), key=lead.__getitem__)
    yield study.Finding(
        f"The shortcut agrees with the model more often than the logit lens at "
        f"{sum(value > 0 for value in lead)} of the {last} layers below the last. The lead is "
        f"largest at layer {widest}: {100 * lead[widest]:.0f} points.",
        headline=True,
    )
    yield study.Finding(
        f"Shortcuts agree with the model at least half of the time from layer {half['mat']} on, "
        f"the logit lens from layer {half['id']} on.",
        headline=True,
    )


def sample(result: StudyResult) -> str:
    """How much of the main text was read: "n = 3,000 texts of 27 documents"."""
    text = result.settings["text"]
    read = next(row for row in result.data if (row["role"], row["text"]) == ("read", text))
    states = "" if read["rows"] == read["texts"] else f"{read['rows']:,} states of "
    documents = "1 document" if read["documents"] == 1 else f"{read['documents']:,} documents"
    return f"n = {states}{read['texts']:,} texts of {documents}"


# --- claims ------------------------------------------------------------------------------------


@study.claim("Shortcuts agree with the model more often than the logit lens, at every layer.")
def _more_often(result: StudyResult) -> study.Verdict:
    answers = {
        k: [study.above(row) for row in result.rows("lead", metric=f"precision@{k}")]
        for k in (1, 5, 10)
    }
    counts = ", ".join(f"{given.count('yes')} (top {k})" for k, given in answers.items())
    return study.Verdict(
        study.at_every(a for given in answers.values() for a in given),
        f"clearly above at this many of {result.model['n_layers']} layers: {counts}",
        EVERY_LAYER,
    )


@study.claim(
    "In early layers, shortcuts predict 28 to 45 % of a next-token model's answers.",
    when=curves.is_next,
)
def _early_agreement(result: StudyResult) -> study.Verdict:
    mat = below_last(result, curve(result, "mat", "precision@1"))
    early = mat[: max(1, round(len(mat) / 3))]
    answers = [study.between(row, 0.28, 0.45) for row in early]
    return study.Verdict(
        study.all_of(answers),
        f"{percent(min(values(early)))} to {percent(max(values(early)))} over the first third of "
        f"the layers; clearly in that range at {answers.count('yes')} of {len(early)}",
        "yes if the intervals of all these layers are inside the range, partly if some are inside "
        "and others outside",
    )


@study.claim(
    "The lead over the logit lens is more than 20 points at all but the last layers.",
    when=curves.is_next,
)
def _wide_lead(result: StudyResult) -> study.Verdict:
    rows = result.rows("lead", metric="precision@1")
    rows = rows[: max(1, round(0.9 * len(rows)))]
    answers = [study.above(row, 0.2) for row in rows]
    return study.Verdict(
        study.at_every(answers),
        f"{100 * min(values(rows)):.0f} to {100 * max(values(rows)):.0f} points; clearly above 20 "
        f"at {answers.count('yes')} of {len(rows)} layers",
        f"{EVERY_LAYER}; the paper's 44 of 48 layers are the first nine tenths of the depth",
    )


@study.claim(
    "In the early layers of a masked model, the logit lens predicts next to nothing.",
    when=curves.is_masked,
)
def _blind_early(result: StudyResult) -> study.Verdict:
    rows = below_last(result, curve(result, "id", "precision@10"))
    early = rows[: max(1, round(0.4 * len(rows)))]
    return study.Verdict(
        study.all_of(study.below(row, 0.05) for row in early),
        f"at most {percent(max(values(early)))} (top 10) over the first two fifths of the layers",
        "yes if the intervals of all these layers are below 5 %, partly if those of some",
    )


@study.claim(
    "From an eighth of the depth on, a shortcut predicts more than a quarter of a masked "
    "model's answers.",
    when=curves.is_masked,
)
def _quarter(result: StudyResult) -> study.Verdict:
    mat = below_last(result, curve(result, "mat", "precision@1"))
    later = mat[round(len(mat) / 8) :]
    return study.Verdict(
        study.share_of((study.above(row, 0.25) for row in later), 1.0),
        f"at least {percent(min(values(later)))} from layer {later[0]['layer']} of {len(mat)} on",
        "yes if the intervals of all these layers are above 25 %; layer 3 of the paper's 24 is an "
        "eighth of the depth",
    )


CLAIMS = (
    _more_often,
    study.Claim(
        "The model is less surprised by a shortcut's token than by the logit lens's, at every "
        "layer.",
        study.Each(
            study.pick("lead", metric="surprisal"),
            "clearly lower at {yes} of {n} layers",
            EVERY_LAYER,
            study.below,
        ),
    ),
    _early_agreement,
    _wide_lead,
    study.Claim(
        "The lead over the logit lens is more than ten points at most layers.",
        study.Each(
            study.pick("lead", metric="precision@1"),
            "clearly at {yes} of {n} layers",
            "yes if the interval of the lead is above 10 points at half of the layers or more",
            partial(study.above, threshold=0.1),
            partial(study.share_of, needed=0.5),
        ),
        curves.is_masked,
    ),
    _blind_early,
    _quarter,
)


# --- figures and tables ------------------------------------------------------------------------


def _points(*metrics: str, panel: str = "") -> study.Pick:
    return study.points(
        "scores",
        "tuned_scores",
        line="{map}",
        panel=panel,
        words={"metric": {metric: metric.capitalize() for metric in metrics}},
        read=curves.main_text,
        metric=metrics,
        map=curves.MAPS,
        fit=lambda result: {*curves.main_fits(result), "tuned"},
    )


FIGURES = (
    study.Figure(
        "precision",
        "Agreement with the model",
        "How often the lens's top token is the model's top token (Precision@1), or among its best "
        "five or ten. Higher is better.",
        _points(*PRECISIONS, panel="{metric}"),
        y=study.Axis("share of states", "share"),
        lines=curves.LENSES,
    ),
    study.Figure(
        "surprisal",
        "Surprisal",
        "How unlikely the full model finds the lens's top token, in nats. The dotted line is the "
        "model's surprisal at its own top token; it is not 0.",
        _points("surprisal"),
        y=study.Axis("surprisal (nats)", low=0),
        lines=curves.LENSES,
        marks=curves.floor,
        size=(5.2, 3.6),
        narrow=True,
    ),
    study.Figure(
        "kl",
        "KL divergence",
        "How far the lens's distribution is from the model's, in nats, on a log scale. Lower is "
        "better. At the last layer it is 0, which a log scale cannot show.",
        _points("kl"),
        y=study.Axis("KL divergence (nats)", "log"),
        lines=curves.LENSES,
        size=(5.2, 3.6),
        narrow=True,
    ),
)

SHORT = {**{metric: metric.replace("precision", "P") for metric in METRICS}, "kl": "KL"}
IN_PERCENT = ("{:.1f}", 100.0)


def _score_rows(result: StudyResult) -> Iterator[study.Row]:
    for metric in METRICS[1:]:
        for row in curves.main_scores(result, metric):
            yield {**row, "column": f"{SHORT[metric]} {row['map']}"}
    for row in result.rows("r2", dst=result.model["n_layers"]):
        yield {**row, "layer": row["src"], "value": row["r2"], "column": f"R\u00b2 {row['map']}"}


TABLES = (
    study.Table(
        "agreement-table",
        "Agreement with the model (%) by layer",
        lambda r: curves.main_scores(r, "precision@1"),
        (study.Column("layer"),),
        across="map",
        cells=(study.estimate("value", "", "{:.1f}", 100),),
        terminal=True,
    ),
    study.Table(
        "scores-table",
        "More scores by layer: P@k in %, surprisal and KL in nats, R\u00b2 of predicting the last "
        "layer; small print: 95 % intervals",
        _score_rows,
        (study.Column("layer"),),
        across="column",
        cells=(study.estimate("value"),),
        dense=True,
        forms={f"{SHORT[m]} {name}": IN_PERCENT for m in PRECISIONS for name in curves.MAPS},
    ),
)
