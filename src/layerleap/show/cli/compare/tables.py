"""Alignments and differences of two models for the terminal, readable at 80 columns."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from layerleap.lens.compare.alignment import Alignment
from layerleap.lens.compare.difference import Difference, Words
from layerleap.lens.compare.matching import Matching
from layerleap.show.cli.tables import new_table


def alignment_table(alignment: Alignment) -> RenderableType:
    """How many blocks met their own number by each kind; every match if there is one kind."""
    table = new_table(Text(f"{alignment.a} and {alignment.b}: blocks at their own number"))
    for head in ("kind", "compared", "by"):
        table.add_column(head, no_wrap=True)
    for head in ("own number", "by chance", "p", "least margin"):
        table.add_column(head, justify="right")
    for one in alignment.matchings:
        margin = "-" if one.smallest_margin is None else f"{one.smallest_margin:+.4f}"
        share = f"{one.chance:.2g}" if one.chance >= 1e-4 else "< 1e-4"
        hits = f"{one.hits} of {len(one.matches)}"
        table.add_row(
            one.kind, one.space, one.measure, hits, f"{one.expected_hits:.1f}", share, margin
        )
    parts: list[RenderableType] = [table]
    if len(alignment.kinds) == 1:
        parts += [_matches(one) for one in alignment.matchings if one.space == "vocabulary"]
    legend = (
        "best: mean over rows of the largest |correlation|; mean: over all pairs of rows; margin: "
        "similarity of a match minus that of the next best block"
    )
    return Group(*parts, *_notes(alignment.notes()), Text(legend, style="dim"))


def _matches(one: Matching) -> RenderableType:
    table = new_table(
        Text(f"{one.kind}, {one.measure}"), "block", "matched to", "similarity", "margin"
    )
    for match in one.matches:
        margin = "-" if match.margin is None else f"{match.margin:+.4f}"
        style = "" if match.is_own else "yellow"
        table.add_row(
            str(match.a), Text(str(match.b), style=style), f"{match.similarity:.4f}", margin
        )
    return table


def difference_table(difference: Difference) -> RenderableType:
    """By block, by head and by neuron."""
    blocks = new_table(
        Text("blocks that moved, in % of their size"), "block", "all", *difference.kinds
    )
    for one in difference.blocks:
        if not one.is_identical:
            cells = [_percent(one.kinds.get(kind)) for kind in difference.kinds]
            blocks.add_row(str(one.block), _percent(one.relative), *cells)
    outside = new_table(Text("outside the blocks, in % of its size"))
    outside.add_column("tensor", overflow="fold")
    outside.add_column("moved", justify="right", no_wrap=True)
    outside.add_column("", overflow="fold", ratio=1)
    for other in difference.outside:
        whole = Text("identical", style="dim") if other.is_identical else _percent(other.relative)
        outside.add_row(Text(other.name), whole, Text(other.remark))
    heads = _words_table("heads that moved most", "head", ("%", "share"))
    for head in difference.heads:
        moved = (f"{100 * head.relative:.3g}", f"{head.share:.2f}")
        _add(heads, head.name, head.kind, moved, head.promotes, head.suppresses)
    neurons = _words_table("neurons that moved most", "neuron", ("moved", "%", "cosine"))
    for neuron in difference.neurons:
        cosine = "-" if neuron.cosine is None else f"{neuron.cosine:+.2f}"
        relative = "-" if neuron.relative is None else f"{100 * neuron.relative:.3g}"
        numbers = (f"{neuron.displacement:.3g}", relative, cosine)
        _add(
            neurons,
            neuron.name,
            neuron.kind,
            numbers,
            neuron.promotes,
            neuron.suppresses,
        )
    legend = (
        "+ promoted, - suppressed by the displacement (for heads, + and - could be swapped); "
        "share: of a head's displacement in the direction that is shown; cosine: of the "
        "displacement to the base's vector"
    )
    tables = [table for table in (blocks, outside, heads, neurons) if table.row_count]
    return Group(*tables, *_notes(difference.notes()), Text(legend, style="dim"))


def _words_table(title: str, name: str, numbers: Iterable[str]) -> Table:
    table = new_table(Text(title))
    table.add_column(name, no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for head in numbers:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("tokens", overflow="fold", ratio=1)
    return table


def _add(
    table: Table, name: str, kind: str, numbers: tuple[str, ...], high: Words, low: Words
) -> None:
    """Two lines: the tokens that are promoted, and those that are suppressed."""
    table.add_row(name, kind, *numbers, "+", _tokens(high))
    table.add_row("", "", *("" for _ in numbers), "-", _tokens(low))


def _tokens(words: Words) -> Text:
    return Text(" ".join(scored.token.label for scored in words))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}"


def _notes(notes: Iterable[str]) -> list[Text]:
    return [Text(note, style="yellow") for note in notes]
