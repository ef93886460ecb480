"""The answer to "does early exit pay off?" for the terminal, readable at 80 columns."""

from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from layerleap.lens.intervals import Estimate
from layerleap.results.terminal import new_table
from layerleap.show.samples import sample_size
from layerleap.study.suitability.candidates import Outcome
from layerleap.study.suitability.result import Suitability

STYLES = {"mat": "bright_blue", "id": "dark_orange"}
ANSWERS = {"worth it": "bold green", "not worth it": "bold red", "cannot tell": "bold yellow"}


def suitability_table(result: Suitability) -> RenderableType:
    """Agreement by layer, what calibrated rules save, then the answer with its reasons."""
    notes = [Text(note, style="yellow") for note in result.notes]
    return Group(_agreement(result), _rules(result), *notes, _answer(result))


def _agreement(result: Suitability) -> RenderableType:
    title = f"{result.model['name']}: agreement with the full model, by layer"
    table = new_table(Text(title), "layer")
    for name in result.agreement:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True, ratio=1)
    for layer in range(result.n_layers + 1):
        cells: list[RenderableType] = []
        for name, estimates in result.agreement.items():
            value, style = estimates[layer].value, STYLES[name]
            bar = ProgressBar(1.0, value, complete_style=style, finished_style=style)
            cells += [Text(f"{100 * value:.1f} %"), bar]
        table.add_row(str(layer), *cells)
    size = sample_size([asdict(one) for own in result.agreement.values() for one in own])
    return Group(table, Text(f"{size}, read on {result.settings['text']}.", style="dim"))


def _rules(result: Suitability) -> RenderableType:
    tolerance = 100 * result.settings["tolerance"]
    table = new_table(Text(f"rules that may disagree in {tolerance:g} % of rows, on fresh rows"))
    table.add_column("map", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    table.add_column("checked at", no_wrap=True, overflow="ellipsis", ratio=1)
    for head in ("layers saved", "disagree", "FLOPs", "time"):
        table.add_column(head, justify="right", no_wrap=True)
    chosen = result.chosen
    for row in result.outcomes:
        table.add_row(*_cells(row, result.n_layers), style="bold" if row is chosen else "")
    size = sample_size([row.verified.to_dict() for row in result.rules])
    note = (
        f"{size}. FLOPs and time are fractions of the full model's, time with its 95 % "
        "interval; above 1, exiting costs more than it saves."
    )
    if chosen is not None:
        note += f" Bold: the fastest of {len(result.plans)} plans, chosen on other rows."
    return Group(table, Text(note, style="dim"))


def _cells(row: Outcome, n_layers: int) -> list[Text]:
    named = [Text(row.candidate.map), Text(row.candidate.rule), Text(row.candidate.where)]
    if not row.exits:
        return [*named, Text("never exit", style="dim"), *[Text("-", style="dim")] * 3]
    saved = Text(f"{row.verified.saved:.1f} of {n_layers}")
    disagree = Text(f"{100 * row.verified.disagreement:.1f} %")
    return [*named, saved, disagree, _fraction(row.flops), _fraction(row.time.value, row.time)]


def _fraction(value: float, estimate: Estimate | None = None) -> Text:
    text = Text(f"{value:.2f}", style="green" if value < 1 else "red")
    if estimate is not None and estimate.low is not None and estimate.high is not None:
        text.append(f" {estimate.low:.2f}-{estimate.high:.2f}", style="dim")
    return text


def _answer(result: Suitability) -> RenderableType:
    head = Text("\nearly exit here: ", style="bold").append(
        result.answer, style=ANSWERS[result.answer]
    )
    return Group(head, *(Text(f"- {reason}") for reason in result.reasons))
