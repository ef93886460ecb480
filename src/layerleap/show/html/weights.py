"""Parameters read in the vocabulary as HTML: token pairs as a grid, vectors and heads as tables."""

import html
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from layerleap.lens.vocabulary.copying import HeadScores, HeadTable, Mapped, Role, Share
from layerleap.lens.vocabulary.neurons import Scored
from layerleap.lens.vocabulary.pairs import Pairs
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.lens.vocabulary.weights import ParameterReading
from layerleap.show.html.page import notes_html, styled, write_page

ROLES: dict[Role, str] = {"copies": "Heads that copy", "suppresses": "Heads that suppress"}
SHOWN, PER_RELATION = 12, 5  # heads
HIGH, LOW = "42,120,214", "214,96,42"  # colours of positive and negative scores


def pairs_html(pairs: Pairs) -> str:
    """The grid of the strongest tokens, and below it all pairs."""
    title = f"<h3>{html.escape(pairs.title)}: {' &rarr; '.join(pairs.roles)}</h3>"
    legend = f'<p class="legend">{html.escape(_sentence(pairs.legend()))}</p>'
    return styled("weights", f"{title}{legend}{_grid(pairs)}{_list(pairs)}")


def _grid(pairs: Pairs) -> str:
    grid, (first, second) = pairs.grid, pairs.roles
    strong = {(pair.first.id, pair.second.id) for pair in pairs}
    most = max((abs(score) for row in grid.scores for score in row), default=0.0)
    head = "".join(f"<th>{_label(token)}</th>" for token in grid.columns)
    rows = []
    for token, scores in zip(grid.rows, grid.scores, strict=True):
        cells = "".join(
            _cell(score, most, is_strong=(token.id, other.id) in strong)
            for other, score in zip(grid.columns, scores, strict=True)
        )
        rows.append(f"<tr><th>{_label(token)}</th>{cells}</tr>")
    caption = (
        f"Row: {first}; column: {second}; framed: among the {len(pairs)} strongest pairs. Blue is "
        "positive, orange negative."
    )
    return (
        f'<div class="wide"><table class="grid"><caption>{caption}</caption><thead><tr><th></th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(score: float, most: float, *, is_strong: bool) -> str:
    framed = " class=strong" if is_strong else ""
    return f'<td{framed} style="background:{_colour(score, most)}">{score:.3g}</td>'


def _colour(score: float, most: float) -> str:
    depth = 0.75 * abs(score) / most if most else 0.0
    return f"rgba({HIGH if score >= 0 else LOW},{depth:.2f})"


def _list(pairs: Pairs) -> str:
    items = "".join(
        f"<li>{_label(pair.first)} &rarr; {_label(pair.second)} <i>{pair.score:.3g}</i></li>"
        for pair in pairs
    )
    return f'<ol class="all">{items}</ol>'


def reading_html(reading: ParameterReading) -> str:
    """A table with two columns per vector: both ends of its list of tokens."""
    title = f"<h3>{html.escape(reading.name)}</h3>"
    legend = f'<p class="legend">{html.escape(_sentence(reading.words))}</p>'
    over = "".join(
        f'<th colspan="2">{html.escape(f"{one.kind}, {one.role}, norm {one.norm:.3g}")}</th>'
        for one in reading
    )
    heads = "".join(f"<th>{word}</th>" for one in reading for word in one.words)
    ends = [end for one in reading for end in (one.promotes, one.suppresses)]
    body = "".join(f"<tr>{''.join(map(_scored, row))}</tr>" for row in zip_longest(*ends))
    notes = notes_html(f"no {name}: {why}" for name, why in reading.missing.items())
    return styled(
        "weights",
        f'{title}{legend}<div class="wide"><table class="ends"><thead><tr>{over}</tr>'
        f"<tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{notes}",
    )


def _scored(one: Scored | None) -> str:
    return "<td></td>" if one is None else f"<td>{_label(one.token)} <i>{one.score:.3g}</i></td>"


def heads_html(table: HeadTable) -> str:
    """A map of all heads, then those with a role and the evidence for it."""
    title = f"<h3>What the heads of {html.escape(table.about['model'])} do to a token</h3>"
    legend = f'<p class="legend">{html.escape(_sentence(table.legend()))}</p>'
    roles = "".join(_role(table, role) for role in ROLES) + _mappings(table)
    return styled("weights", f"{title}{legend}{_map(table)}{roles}{notes_html(table.notes())}")


def _map(table: HeadTable) -> str:
    """A row per block and a cell per head."""
    n = 1 + max(head.head for head in table)
    head = "".join(f"<th>H{number}</th>" for number in range(n))
    rows = []
    for block in sorted({one.block for one in table}):
        cells = "".join(_head_cell(one) for one in table if one.block == block)
        rows.append(f"<tr><th>L{block}</th>{cells}</tr>")
    caption = "Blue: share of tokens copied; orange: share suppressed; the larger one, in percent."
    return (
        f'<div class="wide"><table class="grid"><caption>{caption}</caption><thead><tr><th></th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _head_cell(head: HeadScores) -> str:
    copies, suppresses = head.copies.value, head.suppresses.value
    share = copies if copies >= suppresses else -suppresses
    title = f"{head.name}: copies {copies:.1%}, suppresses {suppresses:.1%}"
    return (
        f'<td style="background:{_colour(share, 1.0)}" title="{title}">{100 * abs(share):.0f}</td>'
    )


def _role(table: HeadTable, role: Role) -> str:
    heads = table.having(role)
    if not heads:
        return f"<h3>{ROLES[role]}: none</h3>"
    more = f"; the first {SHOWN} of {len(heads)}" if len(heads) > SHOWN else ""
    rows = "".join(_head_row(head, role) for head in heads[:SHOWN])
    return f"<h3>{ROLES[role]}{more}</h3>{_table(('head', 'share', '95 %', 'for example'), rows)}"


def _head_row(head: HeadScores, role: Role) -> str:
    share = head.copies if role == "copies" else head.suppresses
    examples = " ".join(map(_label, head.copied if role == "copies" else head.suppressed))
    return _row([head.name, *_share(share), examples])


def _mappings(table: HeadTable) -> str:
    rows = "".join(
        _mapped(head, one)
        for relation in table.relations
        for head, one in table.mapping(relation)[:PER_RELATION]
    )
    if not rows:
        return "<h3>Heads that map: none</h3>"
    heads = ("relation", "head", "share", "95 %", "control", "identity", "for example")
    return (
        f"<h3>Heads that map; the first {PER_RELATION} of each relation</h3>{_table(heads, rows)}"
    )


def _mapped(head: HeadScores, one: Mapped) -> str:
    examples = " ".join(f"{_label(a)}&rarr;{_label(b)}" for a, b in one.examples)
    controls = (f"{one.control:.0%}", f"{one.similar:.0%}")
    return _row([html.escape(one.relation), head.name, *_share(one.share), *controls, examples])


def _share(share: Share) -> tuple[str, str]:
    return f"{share.value:.0%}", f"{share.low:.0%} to {share.high:.0%}"


def _table(heads: Sequence[str], rows: str) -> str:
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table class=ends><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _label(token: TokenLabel) -> str:
    label = html.escape(token.label, quote=True)
    return f'<span title="{label} ({token.id})">{label}</span>'


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def write_weights(
    results: Sequence[Pairs | ParameterReading | HeadTable], name: str, path: Path
) -> Path:
    """Write results as a standalone page and return its path; `name` is what was read."""
    about = results[0].about
    return write_page(
        "".join(one._repr_html_() for one in results),
        path,
        kicker="weights",
        title=("What", about["model"], "says in its weights"),
        facts=(name, f"inverse: {about['inverse']}", f"norms: {about['norms']}"),
        text="",
        heading="Parameters as tokens",
        lead="Read from the weights alone, without running the model. Hover over a token to see "
        "its id.",
    )
