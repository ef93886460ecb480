"""Section "tuned": does training a lens add to fitting it in closed form?"""

from collections.abc import Iterator
from functools import partial

from layerleap import StudyResult, study
from layerleap.maps import summary
from layerleap.study import Page, pick
from layerleap_papers.jump_to_conclusions.curves import score_rows
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext
from layerleap_papers.jump_to_conclusions.trained import START_NAMES

PAGE = Page(__file__)
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


def findings(result: StudyResult) -> Iterator[study.Said]:
    """At how many layers training got ahead, and after how many rows."""
    for start, name in STARTS.items():
        rows = result.rows("tuned", start=start)
        if not rows:
            continue
        known = [row for row in rows if None not in (row["kl_tuned"], row["kl_closed"])]
        ahead = [row for row in known if row["kl_tuned"] < row["kl_closed"]]
        needed = sorted({row["rows_needed"] for row in ahead if row["rows_needed"] is not None})
        ends = " to ".join(f"{n:,}" for n in dict.fromkeys((*needed[:1], *needed[-1:])))
        after = f", which they reach after {ends} rows" if ends else ""
        yield PAGE.say("tuned", name=name, ahead=len(ahead), n=len(rows), after=after)


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
        checks = result.rows("tuned_progress", layer=row["layer"], start=row["start"])
        most = max((line["rows_seen"] for line in checks), default=0)
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


SECTION = PAGE.section(
    "tuned",
    run,
    findings=findings,
    shows=(
        PAGE.figure("tuned", partial(_points, measure="kl")),
        PAGE.figure("tuned_agreement", partial(_points, measure="agreement")),
        PAGE.figure("tuned_rows", _needed),
        PAGE.table("tuned-table", pick("tuned")),
    ),
)
