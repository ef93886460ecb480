"""Section "tuned": does training a lens add to fitting it in closed form?"""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.maps import summary
from layerleap.study import pick
from layerleap_papers.jump_to_conclusions.curves import score_rows
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext
from layerleap_papers.jump_to_conclusions.trained import START_NAMES

STARTS = {"mat": "the closed form", "identity": "the identity"}


def _named(rows: list[study.Row]) -> list[study.Row]:
    return [{**row, "start": START_NAMES[row["start"]]} for row in rows]


def run(context: ShortcutContext) -> study.Tables:
    """How training went, and the scores of the trained lens on held-out text."""
    trained = context.trained
    return {
        "tuned": sorted(
            ({**row, **trained.stopping} for row in _named(summary(trained.progress))),
            key=lambda row: (row["layer"], row["start"]),
        ),
        "tuned_progress": _named(trained.progress),
        "tuned_scores": [
            row
            for text, reading in context.readings.items()
            for row in score_rows(reading.scores, text, ["tuned"])
        ],
    }


def findings(result: StudyResult) -> Iterator[study.Finding]:
    """At how many layers training got ahead, and after how many rows."""
    for start, name in STARTS.items():
        rows = result.rows("tuned", start=start)
        if not rows:
            continue
        known = [row for row in rows if None not in (row["kl_tuned"], row["kl_closed"])]
        ahead = [row for row in known if row["kl_tuned"] < row["kl_closed"]]
        needed = sorted({row["rows_needed"] for row in ahead if row["rows_needed"] is not None})
        ends = " to ".join(f"{n:,}" for n in dict.fromkeys((*needed[:1], *needed[-1:])))
        yield study.Finding(
            f"Trained from {name}, {len(ahead)} of {len(rows)} layers end with a lower KL than the "
            f"closed form{f', which they reach after {ends} rows' if ends else ''}, measured on "
            "the rows that decided when training stops."
        )


LINES = {
    "closed": study.Line("closed form (mat)", "blue"),
    "mat": study.Line("tuned, started from mat", "green", "D"),
    "identity": study.Line("tuned, started from id", "green", "v", "dashed"),
}


def _points(result: StudyResult, measure: str) -> Iterator[study.Row]:
    closed = set()
    for row in result.rows("tuned"):
        sample = {"x": row["layer"], "rows": row["rows"], "documents": row["documents"]}
        if row["layer"] not in closed:
            closed.add(row["layer"])
            yield {**sample, "y": row[f"{measure}_closed"], "line": "closed"}
        yield {**sample, "y": row[f"{measure}_tuned"], "line": row["start"]}


def _needed(result: StudyResult) -> Iterator[study.Row]:
    """Rows until training was ahead; where it never was, all rows that it saw, in grey."""
    never = "grey: never ahead" if result.rows("tuned", rows_needed=None) else ""
    for row in result.rows("tuned"):
        own = result.rows("tuned_progress", layer=row["layer"], start=row["start"])
        most = max((line["rows_seen"] for line in own), default=0)
        needed = row["rows_needed"]
        yield {
            "x": row["layer"],
            "y": most if needed is None else needed,
            "line": row["start"],
            "muted": needed is None,
            "note": never,
            "rows": row["rows"],
            "documents": row["documents"],
        }


SAMPLE = (
    "of documents set aside to decide when training stops: not trained on, but not held out "
    "either, which flatters training a little; single runs, so without interval"
)
FIGURES = (
    study.Figure(
        "tuned",
        "Closed form against training: KL divergence",
        "On a log scale; lower is better. With intervals and on held-out text, the tuned lens is "
        "in the figures of agreement, surprisal and KL above.",
        lambda r: _points(r, "kl"),
        y=study.Axis("KL divergence (nats)", "log"),
        lines=LINES,
        size=(5.2, 3.9),
        narrow=True,
        sample=SAMPLE,
    ),
    study.Figure(
        "tuned_agreement",
        "Closed form against training: agreement",
        "Higher is better.",
        lambda r: _points(r, "agreement"),
        y=study.Axis("agreement", "share"),
        lines=LINES,
        size=(5.2, 3.9),
        narrow=True,
        sample=SAMPLE,
    ),
    study.Figure(
        "tuned_rows",
        "Rows of training until ahead",
        "How many rows training needed until its KL was below that of the closed form. Grey bars "
        "show all rows that it saw without getting there.",
        _needed,
        "bars",
        y=study.Axis("rows of training"),
        size=(9.5, 3.2),
        sample=SAMPLE,
        lines={
            "mat": study.Line("started from mat", "green"),
            "identity": study.Line("started from id", "orange"),
        },
    ),
)

TABLES = (
    study.Table(
        "tuned-table",
        "Training against the closed form, on the rows that decided when training stops",
        pick("tuned"),
        (
            study.Column("layer"),
            study.Column("start", "started from"),
            study.Column("rows_needed", "rows until ahead", "{:,.0f}", words={None: "never"}),
            study.Column("seconds_needed", "seconds", "{:,.1f}"),
            study.Column("kl_closed", "KL closed", "{:.2f}"),
            study.Column("kl_tuned", "KL tuned", "{:.2f}"),
            study.Column("agreement_closed", "P@1 closed (%)", "{:.1f}", 100),
            study.Column("agreement_tuned", "P@1 tuned (%)", "{:.1f}", 100),
        ),
    ),
)

SECTION = study.Section(
    "tuned",
    "Fitted or trained?",
    run,
    lead="A shortcut is fitted in one step, to states. A tuned lens is trained in many steps, to "
    "match the model's output. What does training add, and how much text does it take?",
    short="Training",
    help="trained maps; with --quick only if named",
    findings=findings,
    shows=(*FIGURES, *TABLES),
    needs=("readings",),
    quick=False,
)
