"""Transfer: how well shortcuts fitted on one text read another."""

from collections.abc import Iterator

from layerleap import StudyResult, study
from layerleap.study import Page, above, all_of, below, short, untested
from layerleap_papers.jump_to_conclusions.curves import LENSES, estimates, is_masked, point
from layerleap_papers.jump_to_conclusions.shortcut_context import ShortcutContext

PAGE = Page(__file__)
COLOURS = ("blue", "green", "pink", "olive")  # of fits, in their order


def tables(context: ShortcutContext) -> study.Tables:
    """What agreement changes, on average over layers, if maps come from the other text."""
    other = context.settings.other
    if other is None:
        return {}
    rows = []
    for read, away in ((context.text, other), (other, context.text)):
        scores = context.readings[read].scores
        home, guest = (context.equal_fits[text] for text in (read, away))
        agrees = [(scores.rank[fit][:, :-1] == 0).double() for fit in (home, guest)]
        change = (agrees[1] - agrees[0]).mean(1, keepdim=True)
        (row,) = estimates(scores.documents, change)
        about = {"read": read, "fitted_on": away, "fit": guest, "own_fit": home}
        sizes = {
            f"{name}_rows": context.counts("fit", fit)["rows"]
            for name, fit in (("fit", guest), ("own", home))
        }
        rows.append({**about, **row, **sizes})
    return {"transfer": rows}


def findings(result: StudyResult) -> Iterator[study.Said]:
    """Fits of equal size are compared: more text gives better maps, wherever it comes from."""
    for row in result.rows("transfer"):
        verb, points = "loses" if row["value"] < 0 else "gains", abs(100 * row["value"])
        yield PAGE.say("transfer", row=row, verb=verb, points=points)


@PAGE.claim("transfers")
def _transfers(result: StudyResult) -> study.Tested:
    rows = result.rows("transfer")
    if not rows:
        return untested("only one text was given")
    worst = min(rows, key=lambda row: row["value"])
    if is_masked(result):
        answer = all_of(above(row, -0.02) for row in rows)
        why = "yes if the intervals of both losses are below 2 points"
    else:
        answer = all_of([*(above(row, -0.1) for row in rows), below(worst, -0.01)])
        why = (
            "yes if the intervals of both losses are below 10 points and that of the larger one "
            "is above 1 point, partly if it is smaller"
        )
    changes = ", ".join(f"{100 * row['value']:+.1f} points reading {row['read']}" for row in rows)
    return answer, {"changes": changes, "why": why}


def _curves(result: StudyResult) -> Iterator[study.Row]:
    """Every agreement curve as points and as columns, if a second text was read."""
    if not result.settings["other"]:
        return
    rows = result.rows("scores", metric="precision@1")
    reads = list(dict.fromkeys(row["read"] for row in rows))
    # A text's own fit comes first: the others are compared with it.
    rows.sort(
        key=lambda row: (reads.index(row["read"]), row["fit"] == "-", row["fit"] != row["read"])
    )
    fits = [fit for fit in dict.fromkeys(row["fit"] for row in rows) if fit != "-"]
    for row in rows:
        read, fit = row["read"], row["fit"]
        look = {"line": "id", "colour": LENSES["id"].colour, "column": f"id, read on {read}"}
        if fit != "-":
            look = {
                "line": f"mat fitted on {short(fit, 36)}",
                "colour": COLOURS[fits.index(fit) % len(COLOURS)],
                "column": f"mat fitted on {fit}, read on {read}",
            }
        yield {**row, **point(row, panel=f"read on {short(read)}", **look)}


SHOWS = (
    _transfers,
    PAGE.figure("transfer", _curves, lines={"id": LENSES["id"]}),
    PAGE.table("transfer-table", _curves),
)
