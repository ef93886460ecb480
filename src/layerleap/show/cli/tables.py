"""Tables for the terminal, readable at 80 columns.

In: plain rows (a study, laws, models, readings). Out: rich renderables; printing is the caller's.
Everything that comes from data is put in as `Text`, so that "[red]" in a name stays a name.
"""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from layerleap.lens.evaluate import Evaluation
from layerleap.lens.strip import Strip
from layerleap.lens.vocabulary.tokens import visible
from layerleap.maps.kinds import KINDS, lens_title
from layerleap.show.html.colours import legend_layers, saturation_colour, text_colour
from layerleap.show.report.cells import cells_of
from layerleap.study.result import Row, StudyResult
from layerleap.study.tables import GOOD_OR_BAD, Table as TableSpec

COLOURS = {"good": "green", "bad": "red", "partly": "yellow", "open": "dim"}
VERDICTS = {"holds": "green", "fails": "bold red", "not applicable": "dim", "loosened": "yellow"}
SCORES = {
    "precision@1": "P@1, %",
    "precision@5": "P@5, %",
    "precision@10": "P@10, %",
    "surprisal": "surprisal",
    "kl": "KL",
    "r2": "R2",
}


def token_text(token: str) -> str:
    """The token with nothing invisible left; quotes if it is empty."""
    return visible(token) or "''"


def _column_order(name: str) -> tuple[int, str]:
    """The logit lens first, then other kinds as they are registered, then banks by name."""
    kinds = list(KINDS)
    return (kinds.index(name) if name in kinds else len(kinds), name)


def terminal_table(table: TableSpec, result: StudyResult) -> RenderableType | None:
    """A table of a study; None if it has no rows."""
    head, rows = cells_of(table, result)
    if not rows:
        return None
    shown = new_table(Text(table.caption))
    if table.dense:  # heads of one word per line leave room for names
        shown.padding = 0
        head = [title.replace(" ", "\n").replace("\n%", " %") for title in head]
    for number, title in enumerate(head):
        is_number = any(row[number].sort is not None for row in rows)
        # Names are folded where there is no room, never cut.
        shown.add_column(Text(title), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        cells = [Text(cell.text, style=COLOURS.get(cell.verdict, "")) for cell in row]
        for text, cell in zip(cells, row, strict=True):
            if cell.small and not table.dense:  # a dense table has no room for intervals
                text.append(f" {cell.small}", style="dim")
        shown.add_row(*cells)
    return shown


def claims_table(result: StudyResult) -> RenderableType:
    """What the paper claims, and whether it holds here; what was not tested is only counted."""
    table = new_table(Text("claims of the paper, tested here"))
    table.add_column("claim", ratio=5)
    table.add_column("holds here?", no_wrap=True)
    table.add_column("measured", ratio=4)
    for row in (row for row in result.claims if row not in result.untested):
        style = COLOURS.get(GOOD_OR_BAD.get(row["agrees"], "open"), "")
        table.add_row(Text(row["claim"]), Text(row["agrees"], style=style), Text(row["seen"]))
    left = f"{len(result.untested)} more could not be tested in this run: see the report"
    return Group(table, Text(left, style="dim")) if result.untested else table


def laws_table(rows: list[Row]) -> RenderableType:
    """Each law with its verdict; `status` is "holds", "fails", "loosened" or "not applicable"."""
    table = new_table()
    table.add_column("law", ratio=5)
    table.add_column("verdict", no_wrap=True)
    table.add_column("detail", ratio=5)
    for row in rows:
        verdict = Text(row["status"], style=VERDICTS.get(row["status"], ""))
        table.add_row(Text(row["law"]), verdict, Text(row.get("detail") or "", style="dim"))
    held = sum(row["status"] == "holds" for row in rows)
    failed = sum(row["status"] == "fails" for row in rows)
    loosened = sum(row["status"] == "loosened" for row in rows)
    others = f"{len(rows) - held - failed - loosened} not applicable"
    words = [
        f"{held} hold",
        f"{failed} fail",
        *([f"{loosened} loosened"] if loosened else []),
        others,
    ]
    verdict = Text(", ".join(words))
    verdict.stylize("bold red" if failed else "green")
    return Group(table, verdict)


def inventory_table(rows: list[Row]) -> RenderableType:
    """The models that can be had by name; notes, licences and paths are lines under the table."""
    table = new_table()
    for head in ("name", "kind", "size"):
        table.add_column(head, no_wrap=True, justify="right" if head == "size" else "left")
    table.add_column("source", no_wrap=True, overflow="ellipsis", ratio=1, min_width=7)
    table.add_column("cached", no_wrap=True)
    for row in rows:
        cells = [_plain(row.get(key)) for key in ("name", "kind")]
        cells.append(Text(_size(row.get("size"))))
        cells.append(_plain(row.get("source")))
        cached = Text("yes", style="green") if row.get("cached") else Text("no", style="dim")
        table.add_row(*cells, cached)
    return Group(table, *_remarks(rows))


def tasks_table(rows: list[Row]) -> RenderableType:
    """The tasks that can be had by name."""
    table = new_table()
    for head in ("task", "from", "kind", "examples", "answers"):
        is_number = head in ("examples", "answers")
        table.add_column(head, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        counts = (Text(f"{row[key]:,}") for key in ("examples", "labels"))
        table.add_row(*(_plain(row.get(key)) for key in ("task", "says", "kind")), *counts)
    return table


def accuracy_table(rows: list[Row]) -> RenderableType:
    """Right answers in percent, by task and number of demonstrations."""
    shots = sorted({cell["shots"] for row in rows for cell in row["accuracy"]} - {None})
    table = new_table(Text("Right answers (%) by number of demonstrations"))
    table.add_column("task", overflow="fold")
    for head in (*map(str, shots), "shuffled", "no model"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("learned?", no_wrap=True)
    for row in rows:
        values = {(cell["answers"], cell["shots"]): cell["value"] for cell in row["accuracy"]}
        most = max(n for answers, n in values if answers == "true")
        values["none", None] = max(values["majority", None], values["copy", None])
        keys = [*(("true", n) for n in shots), ("shuffled", most), ("none", None)]
        cells = [Text(f"{100 * values[key]:.0f}" if key in values else "") for key in keys]
        table.add_row(_plain(row["task"]), *cells, _learned(row))
    return Group(table, *(Text(one, style="dim") for one in _about_accuracy(rows)))


def _learned(row: Row) -> Text:
    """The verdict, and under it the lead over no demonstrations in points."""
    answer, style = ("yes", "good") if row["works"] else ("not clearly", "partly")
    text, lead = Text(answer, style=COLOURS[style]), row["leads"]["zero-shot"]
    if lead["low"] is None:
        return text
    ends = (100 * lead[key] for key in ("value", "low", "high"))
    return text.append("\n{:+.0f} ({:+.0f} to {:+.0f})".format(*ends), style="not bold default")


def _about_accuracy(rows: list[Row]) -> list[str]:
    """What the columns mean, and what was left out."""
    counts = sorted({row["queries"] for row in rows})
    queries = " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1])))
    said = [
        f"{queries} queries per task, over seeds: {rows[0]['seeds']}. Under the verdict: the lead "
        "of the most demonstrations over none, in points with its 95 % interval. Learned: this "
        "lead, and those over the commonest answer and over copying the question, are clearly "
        "above 0; 'no model' is the better of these two."
    ]
    return said + [
        f"{row['task']}: {row['left_out']:,} examples are left out, because their answers have "
        "several tokens; --answers sequence scores them."
        for row in rows
        if row["left_out"]
    ]


def _remarks(rows: list[Row]) -> list[RenderableType]:
    """Notes and paths, one model per row, folded inside their own column."""
    noted = [row for row in rows if row.get("note") or row.get("path")]
    if not noted:
        return []
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in noted:
        forms = {"note": "{}", "licence": "licence: {}", "path": "{}"}
        lines = [form.format(row[key]) for key, form in forms.items() if row.get(key)]
        grid.add_row(_plain(row["name"]), Text("\n".join(lines), style="dim"))
    return [grid]


def readings_table(frame: list[Row], n_layers: int | None = None) -> RenderableType:
    """What each map reads at each layer of one position: top tokens, agreement and KL.

    The last layer (`n_layers`, or the highest in the rows) is the model's own answer.
    """
    found = {(row["map"], int(row["layer"])): row for row in frame}
    layers = sorted({layer for _, layer in found})
    last = n_layers if n_layers is not None else max(layers, default=0)
    names = sorted({name for name, _ in found}, key=_column_order)
    table = new_table(None, "layer")
    for name in names:
        table.add_column(Text(name), no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column("=", no_wrap=True)
        table.add_column("KL", justify="right", no_wrap=True)
    for layer in (layer for layer in layers if layer < last):
        cells = [cell for name in names for cell in _reading_cells(found.get((name, layer)))]
        table.add_row(str(layer), *cells)
    own = next((found[name, last] for name in names if (name, last) in found), None)
    if own is None:
        return table
    answer = Text("the model's own answer: ", style="bold")
    answer.append_text(_tokens(own["top"]))
    answer.no_wrap, answer.overflow = True, "ellipsis"
    legend = "\u2713 same top answer as the model; KL(model || reading) in nats"
    return Group(table, Text(f"{last:>6}  ").append_text(answer), Text(legend, style="dim"))


def _reading_cells(row: Row | None) -> tuple[Text, Text, Text]:
    if row is None:
        return Text("-", style="dim"), Text(""), Text("")
    mark = Text("\u2713", style="bold green") if row["agrees"] else Text("\u00b7", style="dim")
    kl = row.get("kl")
    return _tokens(row["top"]), mark, Text("-" if kl is None else f"{kl:.2f}")


def _tokens(top: list[Row]) -> Text:
    """Tokens with their probability in percent; too long a list is cut by the column."""
    text = Text(no_wrap=True, overflow="ellipsis")
    for place, entry in enumerate(top):
        text.append("  " if place else "")
        text.append(token_text(entry["token"]), style="" if place else "bold")
        text.append(f" {100 * entry['prob']:.0f}%", style="dim")
    return text


def new_table(title: Text | None = None, *numbers: str) -> Table:
    """Our look: a rule under the head, no frame, as wide as the terminal; columns of numbers."""
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = Table(title=title, title_justify="left", expand=True, **look)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _plain(value: Any) -> Text:
    return Text("-" if value in (None, "") else str(value))


def _size(size: Any) -> str:
    """Bytes as megabytes or gigabytes; what is already text stays as it is."""
    if size is None or isinstance(size, str):
        return size or "-"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def fits_table(rows: list[Row]) -> RenderableType:
    """How each map to the last layer was fitted."""
    heads = ("layer", "rows", "rank", "condition", "ridge", "train R2", "train R2 of logit")
    table = new_table(Text("fits to the last layer"), *heads)
    for row in rows:
        short = row["rank"] < row["width"]
        table.add_row(
            str(row["src"]),
            f"{row['rows']:,}",
            Text(f"{row['rank']}/{row['width']}", style="bold red" if short else ""),
            f"{row['condition']:.1e}",
            f"{row['ridge']:g}",
            f"{row['train_r2']:.3f}",
            f"{row['train_r2_logit']:.3f}",
        )
    short = [row for row in rows if row["rank"] < row["width"]]
    note = (
        f"{len(short)} of {len(rows)} fits are rank-deficient: the rows do not determine every "
        "direction, and the minimum-norm map was taken; fit on more text."
    )
    return Group(table, Text(note, style="yellow")) if short else table


def evaluation_table(evaluation: Evaluation, width: int = 80) -> RenderableType:
    """The scores of every map at every layer; the best of a layer is bold.

    All metrics and intervals need 130 columns. Narrower tables show intervals of Precision@1 and
    KL only, and leave out Precision@5.
    """
    is_wide = width >= 130
    metrics = {
        metric: head for metric, head in SCORES.items() if is_wide or metric != "precision@5"
    }
    table = new_table(Text(evaluation.headline()), "layer")
    table.add_column("map", no_wrap=True, overflow="ellipsis", ratio=1)
    for head in metrics.values():
        table.add_column(head, justify="right", no_wrap=True)
    for layer in range(evaluation.n_layers):
        rows = {(row["map"], row["metric"]): row for row in evaluation.at(layer)}
        for number, name in enumerate(evaluation.maps):
            cells = [
                _score(
                    rows[name, metric],
                    [rows[one, metric] for one in evaluation.maps],
                    is_wide or metric in ("precision@1", "kl"),
                )
                for metric in metrics
            ]
            is_end = number == len(evaluation.maps) - 1
            table.add_row("" if number else str(layer), name, *cells, end_section=is_end)
    legend = "bold: best of the layer; surprisal and KL in nats; all numbers: --json or -o"
    notes = [Text(note, style="yellow") for note in evaluation.notes()]
    return Group(table, *notes, Text(legend, style="dim"))


def _score(row: Row, rivals: list[Row], with_interval: bool) -> Text:
    if row["value"] is None:
        return Text("-", style="dim")
    values = [rival["value"] for rival in rivals if rival["value"] is not None]
    best = (min if row["metric"] in ("surprisal", "kl") else max)(values)
    scale, form = (100, ".0f") if row["metric"].startswith("precision") else (1, ".2f")
    text = Text(f"{scale * row['value']:{form}}", style="bold" if row["value"] == best else "")
    if with_interval and row["low"] is not None and row["high"] is not None:
        ends = f" [{scale * row['low']:{form}},{scale * row['high']:{form}}]"
        text.append(ends, style="dim")
    return text


def tuned_table(rows: list[Row]) -> RenderableType:
    """The closed form beside what tuning made of it, on rows of other documents."""
    heads = ("layer", "KL linear", "KL tuned", "agreement linear", "tuned", "rows until ahead")
    title = "tuned against the closed form (linear), on documents not trained on"
    table = new_table(Text(title), *heads)
    for row in rows:
        needed = row["rows_needed"]
        table.add_row(
            str(row["layer"]),
            f"{row['kl_closed']:.3f}",
            f"{row['kl_tuned']:.3f}",
            *(f"{100 * row[f'agreement_{kind}']:.1f} %" for kind in ("closed", "tuned")),
            Text("never", style="yellow") if needed is None else f"{needed:,}",
        )
    return table


def finetune_table(rows: list[Row]) -> RenderableType:
    """The losses of a fine-tuning, check by check."""
    title = "mean loss per token in nats: of the steps since the last check, and on held-out text"
    table = new_table(Text(title), "step", "trained on", "held out", "seconds")
    for row in rows:
        losses = ("" if row[k] is None else f"{row[k]:.3f}" for k in ("loss", "held_out"))
        table.add_row(str(row["step"]), *losses, f"{row['seconds']:.0f}")
    return table


def strip_table(strip: Strip) -> RenderableType:
    """A line per position: its token, then ranks 1 to k, each with its layer and in its colour."""
    rows = list(strip.rows())
    tables = [
        _strip_rows(strip, lens_title(name), [row for row in rows if row["map"] == name])
        for name in strip.tracks
    ]
    return Group(*tables, _strip_legend(strip))


def _strip_rows(strip: Strip, title: str, rows: Sequence[Row]) -> Table:
    table = new_table(Text(title))
    table.add_column("token", no_wrap=True, overflow="ellipsis", ratio=3)
    for rank in range(1, strip.k + 1):
        table.add_column(f"rank {rank}", no_wrap=True, overflow="ellipsis", ratio=3)
    for row in rows:
        cells = [_strip_cell(rank, strip.n_layers) for rank in row["ranks"]]
        table.add_row(Text(token_text(row["token"]), style="bold"), *cells)
    return table


def _strip_cell(rank: Row, n_layers: int) -> RenderableType:
    style = _layer_style(rank["layer"], n_layers)
    # The layer comes first: it is the point of the strip, and a narrow column cuts the end off.
    text = Text(f"{rank['layer']:>2} ", style=style, no_wrap=True, overflow="ellipsis")
    text.append(token_text(rank["token"]), style="bold underline" if rank["is_next"] else "")
    return Padding(text, (0, 0), style=style)  # fills the cell, so that cells form a strip


def _layer_style(layer: int, n_layers: int) -> str:
    colour = saturation_colour(layer, n_layers)
    if colour is None:
        return "dim"
    red, green, blue = colour
    return f"{text_colour(colour)} on #{red:02x}{green:02x}{blue:02x}"


def _strip_legend(strip: Strip) -> Text:
    legend = Text().append("keeps its rank from layer ", style="dim")
    for layer in legend_layers(strip.n_layers):
        legend.append(f" {layer} ", style=_layer_style(layer, strip.n_layers))
    return legend.append(
        f" on; no colour: only the last layer, {strip.n_layers}, put it there; "
        "underlined: the token that actually comes next",
        style="dim",
    )
