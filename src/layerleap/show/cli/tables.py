"""Tables of commands whose rows are no result of their own: models, tasks, fits, a study.

In: plain rows. Out: grids and renderables for a terminal; printing is the caller's.
"""

from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from layerleap.results.cells import grid_of
from layerleap.results.columns import Column, Row, Table
from layerleap.results.terminal import grid_table
from layerleap.show.report.tables import CLAIMS
from layerleap.study.result import StudyResult

INVENTORY = Table(
    "models",
    "",
    lambda rows: ({**row, "size": _size(row.get("size"))} for row in rows),
    (
        Column("name"),
        Column("kind"),
        Column("size"),
        Column("source"),
        Column("cached", words={True: "yes", False: "no"}, colours={True: "good", False: "open"}),
    ),
)
REMARKS = Table(
    "remarks",
    "",
    lambda rows: (_remarks(row) for row in rows if row.get("note") or row.get("path")),
    (Column("name", " "), Column("text", " ")),
)
TASKS = Table(
    "tasks",
    "",
    lambda rows: rows,
    (
        Column("task"),
        Column("says", "from"),
        Column("kind"),
        Column("examples", form="{:,}"),
        Column("labels", "answers", "{:,}"),
    ),
)
FITS = Table(
    "fits",
    "fits to the last layer",
    lambda rows: ({**row, "of": f"of {row['width']}"} for row in rows),
    (
        Column("src", "layer"),
        Column("rows", form="{:,}"),
        Column("rank", note="of"),
        Column("condition", form="{:.1e}"),
        Column("ridge"),
        Column("train_r2", "train R2", "{:.3f}"),
        Column("train_r2_logit", "train R2 of logit", "{:.3f}"),
    ),
)


def rows_table(table: Table, rows: Any) -> RenderableType:
    """Rows, or the rows of a study, as a table specifies them."""
    return grid_table(grid_of(table, rows))


def study_table(table: Table, result: StudyResult) -> RenderableType | None:
    """A table of a study; None if it has no rows."""
    return grid_table(grid) if (grid := grid_of(table, result)).rows else None


def claims_table(result: StudyResult) -> RenderableType:
    """What the paper claims, and whether it holds here; what was not tested is only counted."""
    columns = tuple(column for column in CLAIMS.columns if column.key != "why")
    table = rows_table(replace(CLAIMS, columns=columns), result)
    left = f"{len(result.untested)} more could not be tested in this run: see the report"
    return Group(table, Text(left, style="dim")) if result.untested else table


def inventory_table(rows: list[Row]) -> RenderableType:
    """The models that can be had by name; notes, licences and paths are lines under the table."""
    return Group(rows_table(INVENTORY, rows), rows_table(REMARKS, rows))


def _remarks(row: Row) -> Row:
    forms = {"note": "{}", "licence": "licence: {}", "path": "{}"}
    lines = [form.format(row[key]) for key, form in forms.items() if row.get(key)]
    return {"name": row["name"], "text": "\n".join(lines)}


def fits_table(rows: list[Row]) -> RenderableType:
    """How each map to the last layer was fitted."""
    short = [row for row in rows if row["rank"] < row["width"]]
    note = (
        f"{len(short)} of {len(rows)} fits are rank-deficient: the rows do not determine every "
        "direction, and the minimum-norm map was taken; fit on more text."
    )
    table = rows_table(FITS, rows)
    return Group(table, Text(note, style="yellow")) if short else table


def accuracy_table(rows: list[Row]) -> RenderableType:
    """Right answers in percent, by task and number of demonstrations."""
    shots = sorted({cell["shots"] for row in rows for cell in row["accuracy"]} - {None})
    conditions = (*map(str, shots), "shuffled", "no model")
    words, colours = {True: "yes", False: "not clearly"}, {True: "good", False: "partly"}
    columns = (
        Column("task"),
        *(Column(condition, form="{:.0f}", scale=100.0) for condition in conditions),
        Column("works", "learned?", words=words, colours=colours, note="lead"),
    )
    caption = "Right answers (%) by number of demonstrations"
    table = Table("accuracy", caption, lambda rows: map(_accuracy, rows), columns)
    return Group(rows_table(table, rows), *(Text(s, style="dim") for s in _about_accuracy(rows)))


def _accuracy(row: Row) -> Row:
    """One task: its accuracies by condition, and the lead over no demonstrations in points."""
    values = {(cell["answers"], cell["shots"]): cell["value"] for cell in row["accuracy"]}
    most = max(n for answers, n in values if answers == "true")
    lead = row["leads"]["zero-shot"]
    ends = "" if lead["low"] is None else "{:+.0f} ({:+.0f} to {:+.0f})"
    return {
        **row,
        **{str(n): value for (answers, n), value in values.items() if answers == "true"},
        "shuffled": values.get(("shuffled", most)),
        "no model": max(values["majority", None], values["copy", None]),
        "lead": ends.format(*(100 * (lead[key] or 0) for key in ("value", "low", "high"))),
    }


def _about_accuracy(rows: list[Row]) -> list[str]:
    """What the columns mean, and what was left out."""
    counts = sorted({row["queries"] for row in rows})
    queries = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1])))
    explanation = (
        f"{queries} queries per task, over seeds: {rows[0]['seeds']}. Beside the verdict: the lead "
        "of the most demonstrations over none, in points with its 95 % interval. Learned: this "
        "lead, and those over the commonest answer and over copying the question, are clearly "
        "above 0; 'no model' is the better of these two."
    )
    left_out = [
        f"{row['task']}: {row['left_out']:,} examples are left out, because their answers have "
        "several tokens; --answers sequence scores them."
        for row in rows
        if row["left_out"]
    ]
    return [explanation, *left_out]


def _size(size: Any) -> str:
    """Bytes as megabytes or gigabytes; what is already text stays as it is."""
    if size is None or isinstance(size, str):
        return size or "-"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
