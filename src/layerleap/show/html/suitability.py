"""`Suitability` as HTML: the answer with its reasons, agreement by layer, and what rules save."""

import html

from layerleap.lens.intervals import Estimate
from layerleap.show.html.page import notes_html, styled
from layerleap.study.suitability.candidates import Outcome
from layerleap.study.suitability.result import Suitability


def suitability_html(result: Suitability) -> str:
    """The answer and its reasons, then two tables."""
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in result.reasons)
    notes = notes_html(result.notes)
    name = html.escape(str(result.model["name"]))
    return styled(
        "suitability",
        f"<h3>Early exit in {name}: {result.answer}</h3><ul>{reasons}</ul>{notes}"
        f"{_rules(result)}{_agreement(result)}",
    )


def _rules(result: Suitability) -> str:
    rows = "".join(_rule(row, result.n_layers, row is result.chosen) for row in result.outcomes)
    heads = ("map", "rule", "checked at", "layers saved", "disagreement", "FLOPs", "time")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        "<table><caption>Calibrated rules on fresh rows; FLOPs and time as fractions of the full "
        "model's; bold: the fastest plan</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _rule(row: Outcome, n_layers: int, is_chosen: bool) -> str:
    cells = ["never exit", "-", "-", "-"]
    if row.exits:
        verified, time = row.verified, row.time
        interval = "" if time.low is None else f" ({time.low:.2f} to {time.high:.2f})"
        cells = [
            f"{verified.saved:.1f} of {n_layers}",
            f"{100 * verified.disagreement:.1f} %",
            f"{row.flops:.2f}",
            f"{time.value:.2f}{interval}",
        ]
    named = [row.candidate.map, row.candidate.rule, row.candidate.where]
    style = ' style="font-weight:700"' if is_chosen else ""
    return f"<tr{style}>{''.join(f'<td>{cell}</td>' for cell in [*named, *cells])}</tr>"


def _agreement(result: Suitability) -> str:
    head = "".join(f"<th>{name}</th>" for name in result.agreement)
    rows = "".join(
        f"<tr><th>{layer}</th>{''.join(_bar(own[layer]) for own in result.agreement.values())}</tr>"
        for layer in range(result.n_layers, -1, -1)
    )
    return (
        "<table><caption>Agreement with the full model by layer</caption>"
        f"<thead><tr><th>layer</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _bar(estimate: Estimate) -> str:
    percent = 100 * estimate.value
    fill = f"linear-gradient(to right,rgba(42,120,214,.45) {percent:.1f}%,transparent 0)"
    return f'<td style="background:{fill};min-width:9em">{percent:.1f} %</td>'
