"""`Alignment` and `Difference` as HTML: heat maps of layers, and tables of what moved."""

import html
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from layerleap.lens.compare.alignment import MEASURES, Alignment
from layerleap.lens.compare.difference import Difference, HeadChange, NeuronChange, Words
from layerleap.lens.compare.matching import Matching
from layerleap.show.html.colours import saturation_colour
from layerleap.show.html.page import notes_html, styled, table, write_page

SPACES = {"vocabulary": "in the vocabulary", "raw": "raw coordinates (control)"}
MEASURED = {"best": "best match", "mean": "mean |correlation|"}
LEVELS = 16  # shades of a heat map: cells of one shade are one path, which keeps pages small
MAP, MARGIN = 270, 26  # pixels: the longer side of a heat map, and the room for numbers
ALIGNMENT_LEAD = (
    "Vectors of both models are read as scores of all tokens, and compared by the correlation of "
    "these scores. A row of a heat map is a block of the first model, a column a block of the "
    "second; darker is more similar, on a scale of its own for each map. Framed: the blocks that "
    "were matched, one to one, so that their similarities have the largest sum (Hungarian "
    "algorithm). The margin of a match is its similarity minus that of the next best block: near 0 "
    "it is a match by a hair, below 0 another block was more similar. The control compares raw "
    "coordinates, which mean the same only if one model was made from the other."
)
DIFFERENCE_LEAD = (
    "How far the tuned model's weights lie from those of its base, relative to their size. The "
    "tokens are those that a displacement (tuned minus base, at unit length) promotes and "
    "suppresses most, by the base's output matrix. A head is read along the direction that holds "
    "most of its displacement; such a direction has no sign, so its two lists could be swapped."
)


def alignment_html(alignment: Alignment) -> str:
    """A summary, then heat maps and matches of each kind of vector."""
    kinds = "".join(_kind(alignment, kind) for kind in alignment.kinds)
    return styled("compare", f"{notes_html(alignment.notes())}{_summary(alignment)}{kinds}")


def write_alignment(alignment: Alignment, path: Path) -> Path:
    """Write an alignment as a standalone page and return its path."""
    first = alignment.matchings[0]
    return write_page(
        alignment_html(alignment),
        path,
        kicker="alignment",
        title=("Which layers of", f"{alignment.a} and {alignment.b}", "correspond"),
        facts=(
            f"{len(first.blocks_a)} and {len(first.blocks_b)} blocks",
            f"{alignment.n_tokens:,} tokens",
            f"{len(alignment.kinds)} kinds of vectors",
        ),
        text="",
        heading="Blocks matched one to one",
        lead=ALIGNMENT_LEAD,
    )


def difference_html(difference: Difference) -> str:
    """Tables by block, by head and by neuron."""
    tables = (_blocks(difference), _outside(difference), _heads(difference), _neurons(difference))
    return styled("compare", notes_html(difference.notes()) + "".join(tables))


def write_difference(difference: Difference, path: Path) -> Path:
    """Write a difference as a standalone page and return its path."""
    moved = len(difference.blocks) - len(difference.unmoved)
    return write_page(
        difference_html(difference),
        path,
        kicker="fine-tuning in words",
        title=("What changed from", f"{difference.base} to {difference.tuned}", ""),
        facts=(f"{moved} of {len(difference.blocks)} blocks moved",),
        text="",
        heading="What moved, and towards which tokens",
        lead=DIFFERENCE_LEAD,
    )


def _summary(alignment: Alignment) -> str:
    columns = [(space, measure) for space in alignment.spaces for measure in MEASURES]
    heads = ["kind", *(f"{MEASURED[measure]}, {SPACES[space]}" for space, measure in columns)]
    rows = [
        [f"<b>{kind}</b>", *(_hits(alignment.matching(kind, m, s)) for s, m in columns)]
        for kind in alignment.kinds
    ]
    caption = (
        "Blocks matched to their own number, how many a random assignment would give, the share of "
        "random assignments that do as well, and the smallest margin"
    )
    return table(caption, heads, rows)


def _hits(one: Matching) -> str:
    n = len(one.matches)
    margin = "-" if one.smallest_margin is None else f"{one.smallest_margin:+.4f}"
    share = f"{one.chance:.2g}" if one.chance >= 1e-4 else "&lt; 0.0001"
    return (
        f"<b>{one.hits} of {n}</b> ({100 * one.hits / n:.0f} %), by chance "
        f"{one.expected_hits:.1f} (p {share}), margin {margin}"
    )


def _kind(alignment: Alignment, kind: str) -> str:
    pairs = [(space, measure) for space in alignment.spaces for measure in MEASURES]
    own = [alignment.matching(kind, measure, space) for space, measure in pairs]
    maps = "".join(map(_heat_map, own))
    rows = [
        [
            str(row[0].a),
            *(
                cell
                for match in row
                for cell in (
                    f"<b>{match.b}</b>" if match.is_own else str(match.b),
                    f"{match.similarity:.4f}",
                    "-" if match.margin is None else f"{match.margin:+.4f}",
                )
            ),
        ]
        for row in _by_block(own)
    ]
    heads = ["block"] + ["matched to", "similarity", "margin"] * len(own)
    caption = "Matches, in the order of the heat maps; bold where a block met its own number"
    return (
        f'<h3>{kind}</h3><div class="maps">{maps}</div>'
        f"<details><summary>every match</summary>{table(caption, heads, rows)}</details>"
    )


def _by_block(matchings: Sequence[Matching]) -> list[list[Any]]:
    """Blocks that every matching has, with their matches; a larger model has blocks without."""
    found = [{match.a: match for match in one.matches} for one in matchings]
    common = [block for block in found[0] if all(block in each for each in found)]
    return [[each[block] for each in found] for block in common]


def _heat_map(one: Matching) -> str:
    values = [value for row in one.similarity for value in row]
    low, high = min(values), max(values)
    cell = _cell(one)
    shades: dict[int, list[str]] = defaultdict(list)
    for y, row in enumerate(one.similarity):
        for x, value in enumerate(row):
            level = int((LEVELS - 1) * (value - low) / (high - low)) if high > low else 0
            shades[level].append(f"M{x * cell} {y * cell}h{cell}v{cell}h-{cell}z")
    cells = "".join(
        f'<path fill="{_shade(level)}" d="{"".join(paths)}"/>'
        for level, paths in sorted(shades.items())
    )
    rows, columns = ({b: i for i, b in enumerate(bs)} for bs in (one.blocks_a, one.blocks_b))
    side = cell - 2
    framed = "".join(
        f"M{columns[match.b] * cell + 1} {rows[match.a] * cell + 1}h{side}v{side}h-{side}z"
        for match in one.matches
    )
    width, height = cell * len(columns), cell * len(rows)
    label = (
        f"{one.kind}, {MEASURED[one.measure]}, {SPACES[one.space]}: {one.hits} of "
        f"{len(one.matches)} blocks matched to their own number"
    )
    return (
        f"<div><p>{MEASURED[one.measure]}<br>{SPACES[one.space]}<br>"
        f"{low:.3f} (light) to {high:.3f} (dark)</p>"
        f'<svg role="img" aria-label="{html.escape(label)}" width="{width + MARGIN}" '
        f'height="{height + MARGIN}" viewBox="-{MARGIN} -2 {width + MARGIN + 2} '
        f'{height + MARGIN}">{cells}<path fill="none" stroke="#e07b00" stroke-width="1.6" '
        f'd="{framed}"/>{_ticks(one, cell, height)}</svg></div>'
    )


def _cell(one: Matching) -> int:
    """The side of a cell, so that maps of small and of deep models are about as large."""
    return max(4, min(24, MAP // max(len(one.blocks_a), len(one.blocks_b))))


def _ticks(one: Matching, cell: int, height: int) -> str:
    """The number of every block where there is room, otherwise of the first and every fifth."""
    step = 1 if cell >= 14 else 5
    style = 'fill="currentColor" font-size="9" font-family="system-ui,sans-serif"'
    marks = []
    for place, block in enumerate(one.blocks_a):
        if place == 0 or block % step == 0:
            y = place * cell + cell // 2 + 3
            marks.append(f'<text x="-4" y="{y}" text-anchor="end" {style}>{block}</text>')
    for place, block in enumerate(one.blocks_b):
        if place == 0 or block % step == 0:
            x = place * cell + cell // 2
            marks.append(
                f'<text x="{x}" y="{height + 11}" text-anchor="middle" {style}>{block}</text>'
            )
    return "".join(marks)


def _shade(level: int) -> str:
    colour = saturation_colour(LEVELS - 1 - level, LEVELS)
    assert colour is not None
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g}&nbsp;%"


def _blocks(difference: Difference) -> str:
    kinds = difference.kinds
    largest = max((one.relative or 0.0 for one in difference.blocks), default=0.0)
    rows = [
        [
            str(one.block),
            _bar(one.relative, largest),
            *(_percent(one.kinds.get(kind)) for kind in kinds),
        ]
        for one in reversed(difference.blocks)
        if not one.is_identical
    ]
    caption = (
        "Blocks that moved, last first: ||tuned - base|| / ||base|| of all parameters, and by kind"
    )
    return table(caption, ["block", "all", *kinds], rows)


def _bar(value: float | None, largest: float) -> str:
    share = 100 * value / largest if value and largest else 0
    fill = f"linear-gradient(to right,rgba(42,120,214,.45) {share:.1f}%,transparent 0)"
    return f'<span class="bar" style="background:{fill}">{_percent(value)}</span>'


def _outside(difference: Difference) -> str:
    rows = [
        [
            html.escape(one.name),
            "did not move" if one.is_identical else _percent(one.relative),
            html.escape(one.remark),
        ]
        for one in difference.outside
    ]
    return table("Outside the blocks", ["tensor", "moved", ""], rows)


def _heads(difference: Difference) -> str:
    def row(one: HeadChange) -> list[str]:
        cells = [one.name, one.kind, _percent(one.relative), f"{100 * one.share:.0f} %"]
        return [*cells, *_words(one)]

    heads = ["head", "matrix", "moved", "in one direction", "promotes", "suppresses"]
    return table("Heads that moved most, by kind", heads, map(row, difference.heads))


def _neurons(difference: Difference) -> str:
    def row(one: NeuronChange) -> list[str]:
        cosine = "-" if one.cosine is None else f"{one.cosine:+.2f}"
        cells = [one.name, one.kind, f"{one.displacement:.3g}", _percent(one.relative), cosine]
        return [*cells, *_words(one)]

    heads = ["neuron", "vector", "displacement", "relative", "cosine to base"]
    return table(
        "Neurons that moved most, by kind",
        [*heads, "promotes", "suppresses"],
        map(row, difference.neurons),
    )


def _words(one: HeadChange | NeuronChange) -> tuple[str, str]:
    return _tokens(one.promotes), _tokens(one.suppresses)


def _tokens(words: Words) -> str:
    labels = (
        f'<span title="{scored.score:+.3g}">{html.escape(scored.token.label)}</span>'
        for scored in words
    )
    return " ".join(labels)
