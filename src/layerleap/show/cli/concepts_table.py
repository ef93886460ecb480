"""Neurons by the words they promote or suppress, for the terminal, readable at 80 columns."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from layerleap.read.vocabulary.index import ConceptIndex
from layerleap.read.vocabulary.search import Match, Matches
from layerleap.read.vocabulary.tokens import TokenLabel
from layerleap.show.cli.tables import new_table


def matches_table(matches: Matches) -> RenderableType:
    """Two lines per neuron: the tokens it promotes (+) and suppresses (-); matches are bold."""
    if not matches:
        return Text("no neuron has these words among its tokens")
    table = new_table(Text(f"neurons for {matches.query!r}"))
    table.add_column("neuron", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("tokens", overflow="fold", ratio=1)
    for match in matches:
        _add(table, match)
    legend = "score: 1.00 has every word first; + promoted, - suppressed by a positive coefficient"
    return Group(table, Text(legend, style="dim"))


def _add(table: Table, match: Match) -> None:
    matched = {token.id for token in match.matched}
    is_promoted = match.side == "promoted"
    other = match.suppresses if is_promoted else match.promotes
    signs = "+-" if is_promoted else "-+"
    table.add_row(match.name, f"{match.score:.2f}", signs[0], _labels(match.matching, matched))
    table.add_row("", "", signs[1], _labels(other, set(), style="dim"))


def _labels(tokens: Iterable[TokenLabel], matched: set[int], style: str = "") -> Text:
    text = Text(style=style)
    for token in tokens:
        text.append(token.label, style="bold green" if token.id in matched else "")
        text.append(" ")
    return text


def index_table(index: ConceptIndex) -> RenderableType:
    """What the index holds, and what it lacks and why."""
    about = index.to_dict()
    lines = [
        Text(f"{index!r}", style="bold"),
        Text(f"{about['settings']['top']} tokens at both ends of each vector"),
    ]
    if about["ranges"]:
        where = f"{about['ranges']['positions']:,} positions of {about['ranges']['text']}"
        lines.append(Text(f"natural ranges of the coefficients on {where}"))
    missing = {"natural ranges": about["no_ranges"], "clusters": about["no_clusters"]}
    lines += [
        Text(f"no {name}: {reason}", style="yellow") for name, reason in missing.items() if reason
    ]
    lines += [
        Text(f"block {entry.block} left out: {entry.reason}", style="yellow")
        for entry in index.blocks
        if entry.reason
    ]
    size = index.path.stat().st_size / 1e6
    return Group(*lines, Text(f"{index.path} ({size:.1f} MB)"))
