"""HTML of results: pieces for notebooks and pages, and a standalone page around one of them.

Nothing refers to a style sheet, script or font from elsewhere, so that it works offline.
"""

import html
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from string import Template

from layerleap.files import whole_file


def styled(kind: str, body: str) -> str:
    """`body` in a box of class `layerleap-KIND`, with the style it needs."""
    style = _asset("html", "results.css")
    return f'<style>{style}</style><div class="layerleap layerleap-{kind}">{body}</div>'


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = list(rows)
    if not rows:
        return ""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def notes_html(notes: Iterable[str]) -> str:
    """A paragraph in small print per note."""
    return "".join(f'<p class="legend">{html.escape(note)}</p>' for note in notes)


def visible(token: str) -> str:
    """A token with its white space made visible, escaped for HTML."""
    text = token.replace("\n", "\u23ce").replace("\t", "\u21e5")
    return html.escape(text if text.strip() else repr(text)[1:-1].replace(" ", "\u2423"))


def write_page(
    body: str,
    path: Path,
    *,
    kicker: str,
    title: tuple[str, str, str],
    facts: Sequence[str],
    text: str,
    heading: str,
    lead: str,
) -> Path:
    """Write a standalone page and return its path.

    `body` is HTML, all else plain text: the kind of page (`kicker`), words before the model's name,
    the name and words after it (`title`), the text that the model was given or "", and how to read
    the page.
    """
    before, name, after = title
    about = f": {text}" if text else ""
    plain = {
        "kicker": kicker,
        "before": before,
        "name": name,
        "after": after,
        "about": about,
        "heading": heading,
        "lead": lead,
    }
    given = f'<h2>Text</h2>\n<p class="given">{html.escape(text)}</p>' if text else ""
    page = Template(_asset("html", "page.html")).substitute(
        {key: html.escape(value) for key, value in plain.items()},
        facts="".join(f"<li>{html.escape(fact)}</li>" for fact in facts),
        style=_asset("report", "report.css"),
        body=body,
        given=given,
    )
    with whole_file(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf8")
    return Path(path)


def _asset(room: str, name: str) -> str:
    return resources.files(f"layerleap.show.{room}").joinpath(name).read_text(encoding="utf8")
