"""Results as HTML: pieces for notebooks, and standalone pages around them.

Nothing refers to a style sheet, script or font from elsewhere, so that it works offline. All HTML
is in templates, which escape every value.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from layerleap.files import whole_file
from layerleap.results.base import Result
from layerleap.results.cells import Cell, Grid
from layerleap.results.colours import text_colour
from layerleap.results.head import PageHead


@cache
def templates() -> Environment:
    """The templates of results; every value is escaped."""
    environment = Environment(
        loader=PackageLoader("layerleap.results"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["text_colour"] = text_colour
    return environment


def style(name: str) -> Markup:
    """A style sheet of this room: our own file, so it is trusted."""
    source, *_ = PackageLoader("layerleap.results").get_source(templates(), name)
    return Markup(source)


def result_html(result: Result, *, linked: bool = True) -> str:
    """A result in a box with the style it needs; in a notebook with a link to more, if any."""
    return boxed(
        result.TEMPLATE,
        result.KIND,
        headline=result.headline(),
        notes=result.notes,
        grids=list(result.grids()),
        legend=result.legend(),
        link=result.link() if linked else None,
        **result.picture(),
    )


def boxed(template: str, kind: str, **values: Any) -> str:
    """A template in a box of class `layerleap-KIND`, with the style it needs."""
    page = templates().get_template(f"{template}.html.j2")
    return page.render(kind=kind, style=style("results.css"), **values)


def tables_html(kind: str, headline: str, grids: Sequence[Grid], notes: Sequence[str] = ()) -> str:
    """Tables under a headline, for what is not a result."""
    about: dict[str, Any] = {"headline": headline, "notes": notes, "legend": "", "link": None}
    return boxed("result", kind, grids=grids, **about)


def facts_html(title: str, facts: Mapping[str, Any], *grids: Grid) -> str:
    """Facts by name, and tables below them."""
    rows = [[Cell(name), Cell(str(value))] for name, value in facts.items()]
    return tables_html("about", title, [Grid(("", ""), rows), *grids])


def write_page(path: Path, head: PageHead, *results: Result) -> Path:
    """Write results as a standalone page and return its path."""
    body = Markup("\n".join(result_html(result, linked=False) for result in results))
    template = templates().get_template("page.html.j2")
    page = template.render(head=head, body=body, style=style("page.css"))
    with whole_file(Path(path)) as temporary:
        temporary.write_text(page, encoding="utf8")
    return Path(path)
