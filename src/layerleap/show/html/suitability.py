"""`Suitability` as HTML: the answer with its reasons, what rules save, and agreement by layer."""

from layerleap.results.cells import DASH, Cell, Grid
from layerleap.results.page import tables_html
from layerleap.study.suitability.candidates import Outcome
from layerleap.study.suitability.result import Suitability


def suitability_html(result: Suitability) -> str:
    """The answer and its reasons, then two tables."""
    title = f"Early exit in {result.model['name']}: {result.answer}"
    grids = (_rules(result), _agreement(result))
    return tables_html("suitability", title, grids, [*result.reasons, *result.notes])


def _rules(result: Suitability) -> Grid:
    heads = ("map", "rule", "checked at", "layers saved", "disagreement", "FLOPs", "time")
    caption = (
        "Calibrated rules on fresh rows; FLOPs and time as fractions of the full model's; bold: "
        "the fastest plan"
    )
    rows = [_rule(row, result.n_layers, row is result.chosen) for row in result.outcomes]
    return Grid(heads, rows, caption)


def _rule(row: Outcome, n_layers: int, is_chosen: bool) -> list[Cell]:
    texts = ["never exit", DASH, DASH, DASH]
    if row.exits:
        verified, time = row.verified, row.time
        interval = "" if time.low is None else f" ({time.low:.2f} to {time.high:.2f})"
        texts = [
            f"{verified.saved:.1f} of {n_layers}",
            f"{100 * verified.disagreement:.1f} %",
            f"{row.flops:.2f}",
            f"{time.value:.2f}{interval}",
        ]
    named = [row.candidate.map, row.candidate.rule, row.candidate.where]
    return [Cell(text, strong=is_chosen) for text in [*named, *texts]]


def _agreement(result: Suitability) -> Grid:
    rows = [
        [
            Cell(str(layer), sort=layer),
            *(
                Cell(f"{100 * e[layer].value:.1f} %", sort=e[layer].value, bar=e[layer].value)
                for e in result.agreement.values()
            ),
        ]
        for layer in range(result.n_layers, -1, -1)
    ]
    caption = "Agreement with the full model by layer"
    return Grid(("layer", *result.agreement), rows, caption)
