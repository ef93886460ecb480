"""Neurons, parameters and heads as words, for the terminal, readable at 80 columns."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from layerleap.lens.vocabulary.copying import HeadScores, HeadTable, Role, Share
from layerleap.lens.vocabulary.index import ConceptIndex
from layerleap.lens.vocabulary.neurons import Scored
from layerleap.lens.vocabulary.pairs import Pairs, TokenPair
from layerleap.lens.vocabulary.search import Match, Matches
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.lens.vocabulary.weights import ParameterReading
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
    score = f"{'partial ' if match.partial else ''}{match.score:.2f}"
    table.add_row(match.name, score, signs[0], _labels(match.matching, matched))
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


def pairs_table(pairs: Pairs, columns: int = 2) -> RenderableType:
    """The pairs in several columns, to be read down each of them."""
    table = new_table(Text(f"{pairs.title}: {' -> '.join(pairs.roles)}"))
    for _ in range(columns):
        table.add_column("score", justify="right", no_wrap=True)
        table.add_column("pair", overflow="fold", ratio=1)
    height = -(-len(pairs) // columns)
    parts = [pairs.pairs[start : start + height] for start in range(0, len(pairs), height or 1)]
    for row in zip_longest(*parts):
        table.add_row(*(cell for pair in row for cell in _pair(pair)))
    return Group(table, Text(pairs.legend(), style="dim"))


def _pair(pair: TokenPair | None) -> tuple[Text, Text]:
    if pair is None:
        return Text(""), Text("")
    text = Text(pair.first.label).append(" -> ", style="dim").append(pair.second.label)
    return Text(f"{pair.score:.3g}"), text


def reading_table(reading: ParameterReading) -> RenderableType:
    """Two lines per vector: the tokens at both ends of its list."""
    table = new_table(Text(reading.name))
    table.add_column("vector", no_wrap=True)
    table.add_column("norm", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("tokens", overflow="fold", ratio=1)
    for one in reading:
        high, low = one.words
        table.add_row(one.kind, f"{one.norm:.3g}", high, _scored(one.promotes))
        table.add_row("", "", Text(low, style="dim"), _scored(one.suppresses, style="dim"))
    notes = [Text(f"no {name}: {why}", style="yellow") for name, why in reading.missing.items()]
    return Group(table, *notes, Text(reading.words, style="dim"))


def _scored(end: Sequence[Scored], style: str = "") -> Text:
    return _labels((one.token for one in end), set(), style=style)


HEADS: dict[Role, str] = {
    "copies": "heads that copy the token they attend to",
    "suppresses": "heads that suppress it",
}


def heads_table(heads: HeadTable, shown: int = 10, per_relation: int = 3) -> RenderableType:
    """The heads with a role, the highest share first, each with its evidence."""
    parts: list[RenderableType] = []
    for role, title in HEADS.items():
        own = heads.having(role)
        if own:
            of = f" (first {shown} of {len(own)})" if len(own) > shown else f" ({len(own)})"
            parts.append(_role_table(title + of, role, own[:shown]))
        else:
            parts.append(Text(f"{title}: none of {len(heads)}\n"))
    parts.append(_mappings_table(heads, per_relation))
    notes = [Text(note, style="yellow") for note in heads.notes()]
    return Group(*parts, *notes, Text(heads.legend(), style="dim"))


def _role_table(title: str, role: Role, heads: Sequence[HeadScores]) -> Table:
    table = new_table(Text(title))
    table.add_column("head", no_wrap=True)
    table.add_column("share, 95 %", justify="right", no_wrap=True)
    table.add_column("for example", overflow="fold", ratio=1)
    for head in heads:
        examples = head.copied if role == "copies" else head.suppressed
        table.add_row(head.name, _share(getattr(head, role)), _labels(examples, set()))
    return table


def _mappings_table(heads: HeadTable, per_relation: int) -> RenderableType:
    title = "heads that map it to another"
    found = {name: heads.mapping(name) for name in heads.relations}
    if not any(found.values()):
        return Text(f"{title}: none of {len(heads)}\n")
    table = new_table(Text(f"{title} (first {per_relation} of each relation)"))
    for name in ("relation", "head"):
        table.add_column(name, no_wrap=True)
    for name in ("share, 95 %", "control", "identity"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("for example", overflow="fold", ratio=1)
    for name, own in found.items():
        for place, (head, one) in enumerate(own[:per_relation]):
            arrow = "  ".join(
                f"{first.label}->{second.label}" for first, second in one.examples[:2]
            )
            table.add_row(
                "" if place else name,
                head.name,
                _share(one.share),
                f"{one.control:.0%}",
                f"{one.similar:.0%}",
                Text(arrow),
            )
        if not own:
            table.add_row(name, Text("none", style="dim"))
    legend = (
        "control: second words of other pairs among the same highest; identity: pairs that similar "
        "embeddings alone would map"
    )
    return Group(table, Text(legend, style="dim"))


def _share(share: Share) -> Text:
    text = Text(f"{share.value:.0%}")
    return text.append(f" [{100 * share.low:.0f},{100 * share.high:.0f}]", style="dim")
