"""The answer to "is early exit worth it?" for the terminal, readable at 80 columns.

In: the plain-data result of a suitability study. Out: a rich renderable.
"""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from layerleap.show.cli.tables import STYLES, new_table
from layerleap.show.figures.select import Row, Study, finite, sample

ANSWERS = {"worth it": "bold green", "not worth it": "bold red", "cannot tell": "bold yellow"}


def suitability_table(result: Study) -> RenderableType:
    """Agreement by layer, what calibrated rules save and take, then the verdict with reasons."""
    notes = [Text(note, style="yellow") for note in result["notes"]]
    return Group(_agreement(result), _rules(result), *notes, _verdict(result))


def _agreement(result: Study) -> RenderableType:
    model, rows = result["model"], result["agreement"]
    table = new_table(Text(f"{model['name']}: agreement with the full model, by layer"))
    table.add_column("layer", justify="right", no_wrap=True)
    for name in ("id", "mat"):
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, ratio=1)
    by = {(row["map"], row["layer"]): row["value"] for row in rows}
    for layer in range(model["n_layers"] + 1):
        cells: list[RenderableType] = []
        for name in ("id", "mat"):
            value, style = by[name, layer], STYLES[name]
            bar = ProgressBar(1.0, value, complete_style=style, finished_style=style)
            cells += [Text(f"{100 * value:.1f} %"), bar]
        table.add_row(str(layer), *cells)
    return Group(table, Text(f"{sample(rows)}, read on {result['settings']['text']}.", style="dim"))


def _rules(result: Study) -> RenderableType:
    settings = result["settings"]
    table = new_table(
        Text(f"rules that may disagree in {100 * settings['tolerance']:g} % of rows, on fresh rows")
    )
    table.add_column("map", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("checked at", no_wrap=True, overflow="ellipsis", ratio=1)
    for head in ("layers saved", "disagree", "FLOPs", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    chosen = result["chosen"]
    for row in [*result["rules"], *([] if chosen is None else [chosen])]:
        table.add_row(
            *_cells(row, result["model"]["n_layers"]), style="bold" if row is chosen else ""
        )
    note = (
        f"{sample([row['verified'] for row in result['rules']])}. FLOPs and time as shares of the "
        "full model's, time with its 95 % interval; above 1, exiting costs more than it saves."
    )
    if chosen is not None:
        note += f" Bold: the quickest of {len(result['plans'])} plans, chosen on other rows."
    return Group(table, Text(note, style="dim"))


def _cells(row: Row, last: int) -> list[Text]:
    named = [Text(row["map"]), Text(row["rule"]), Text(row["name"])]
    if not row["exits"]:
        return [*named, Text("exit nowhere", style="dim"), *[Text("-", style="dim")] * 3]
    seen = row["verified"]
    return [
        *named,
        Text(f"{seen['saved']:.1f} of {last}"),
        Text(f"{100 * seen['disagreement']:.1f} %"),
        _share({"value": row["flops"]}),
        _share(row["time"]),
    ]


def _share(row: Row) -> Text:
    value, low, high = row["value"], finite(row.get("low")), finite(row.get("high"))
    text = Text(f"{value:.2f}", style="green" if value < 1 else "red")
    if low is not None and high is not None:
        text.append(f" {low:.2f}-{high:.2f}", style="dim")
    return text


def _verdict(result: Study) -> RenderableType:
    verdict = result["verdict"]
    head = Text("\nearly exit here: ", style="bold")
    head.append(verdict["answer"], style=ANSWERS[verdict["answer"]])
    return Group(head, *(Text(f"- {reason}") for reason in verdict["reasons"]))
