"""`Matches` as HTML: a line per neuron, with the tokens it promotes and suppresses."""

import html
from collections.abc import Iterable

from layerleap.lens.vocabulary.search import Match, Matches
from layerleap.lens.vocabulary.tokens import TokenLabel
from layerleap.show.html.page import notes_html, styled

HEADS = ("neuron", "score", "matches", "promotes", "suppresses")


def matches_html(matches: Matches) -> str:
    """A table of the neurons; the tokens that match are bold."""
    notes = notes_html(matches.notes())
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    body = "".join(map(_row, matches)) or f'<tr><td colspan="{len(HEADS)}">no neuron</td></tr>'
    title = html.escape(f"neurons for \u201c{matches.query}\u201d")
    table = f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return styled("concepts", f"{table}</table>{notes}")


def _row(match: Match) -> str:
    matched = {token.id for token in match.matched}
    ends = {"promoted": match.promotes, "suppressed": match.suppresses, match.side: match.matching}
    tokens = (_tokens(end, matched) for end in ends.values())
    score = f"{match.score:.2f}{' (partial)' if match.partial else ''}"
    cells = (match.name, score, match.side, *tokens)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _tokens(tokens: Iterable[TokenLabel], matched: set[int]) -> str:
    labels = ((html.escape(token.label), token.id in matched) for token in tokens)
    return " ".join(f"<b>{label}</b>" if is_match else label for label, is_match in labels)
