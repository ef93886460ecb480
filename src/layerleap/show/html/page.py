"""A standalone page around the HTML of a result.

In: the HTML, and what the page is about. Out: one file that opens offline.
"""

import html
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from layerleap.files import whole_file


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
    """Write the page and return its path.

    Args:
        body: HTML with its own style. All other arguments are plain text and get escaped.
        path: the file to write.
        kicker: what kind of page it is, above the title.
        title: words before the model's name, the name, and words after it.
        facts: short facts below the title.
        text: the text that the model was given.
        heading: the heading above the body.
        lead: how to read the body.
    """
    style = (
        resources.files("layerleap.show.report").joinpath("report.css").read_text(encoding="utf8")
    )
    before, name, after = map(html.escape, title)
    page = PAGE.format(
        style=style, kicker=html.escape(kicker), before=before, name=name, after=after,
        facts="".join(f"<li>{html.escape(fact)}</li>" for fact in facts), text=html.escape(text),
        heading=html.escape(heading), lead=html.escape(lead), body=body,
    )  # fmt: skip
    with whole_file(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf8")
    return Path(path)


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>{before} {name} {after}: {text}</title>
<style>{style}</style>
</head>
<body>
<header><div class="wrap">
<p class="kicker">layerleap &middot; {kicker}</p>
<h1>{before} <span class="name">{name}</span> {after}</h1>
<ul class="facts">{facts}</ul>
</div></header>
<main class="wrap">
<h2>Text</h2>
<p class="given">{text}</p>
<h2>{heading}</h2>
<p>{lead}</p>
{body}
</main>
</body>
</html>
"""
