"""Wikipedia markup converted to plain prose.

In: a MediaWiki XML dump (bz2).
Out: (title, text) of each article: whole sentences, paragraphs separated by a blank line.
Not here: downloading the dump and writing the result (`download.py`).

Lists, tables, headings, captions and references are dropped. So is every sentence with a formula
or an unknown template: a model should not be judged on text with holes in it.
"""

import bz2
import gzip
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.parsers.expat import errors

HOLE, LISTED = "\ue000", "\ue001"  # private-use characters that no article contains

SKIPPED_SECTIONS = re.compile(
    r"(external links|see also|further reading|bibliography|selected bibliography|sources|"
    r"works cited|citations|gallery|filmography|discography|works|publications|"
    r"((explanatory )?notes|references|footnotes)( and (notes|references|footnotes))?)$"
)
SKIPPED_TAGS = (
    *("table", "ref", "references", "gallery", "timeline", "source", "pre", "score", "graph"),
    *("categorytree", "imagemap", "inputbox", "section", "templatedata"),
)
FORMULAS = ("math", "chem", "ce", "hiero")
# Removed before parsing: there are thousands, and each replacement costs a search.
REFERENCES = re.compile(
    r"<!--.*?-->|<ref\b[^<>]*/>|<ref\b[^<>]*>.*?</ref\s*>", re.DOTALL | re.IGNORECASE
)
ENDS_TOO_EARLY = {
    errors.codes[errors.XML_ERROR_NO_ELEMENTS],
    errors.codes[errors.XML_ERROR_UNCLOSED_TOKEN],
    errors.codes[errors.XML_ERROR_PARTIAL_CHAR],
}
REDIRECT = re.compile(r"\s*#redirect", re.IGNORECASE)
SKIPPED_LINKS = re.compile(r"\s*:?(file|image|category|media|[a-z]{2,3})\s*:", re.IGNORECASE)

# Beginnings of the names of templates that print nothing in running text.
SILENT = re.compile(
    r"(sfn|harv|rp$|cite|citation|cn$|fact$|refn|efn|notetag|clarif|when|who|which|page needed|"
    r"ipa|respell|pron|lang-|coord|anchor|dubious|dead|update|failed|verif|by whom|"
    r"according|vague|better|not in|see|audio|#tag|flagicon|clear|note|ref$|nts|contradict|full)"
)
DASHES = ("mdash", "ndash", "snd", "snds", "mdashb", "spaced ndash", "dash", "en dash")
UNITS = {
    **{"km2": "square kilometres", "sqkm": "square kilometres", "sqmi": "square miles"},
    **{"km": "kilometres", "m": "metres", "cm": "centimetres", "mm": "millimetres", "nm": "nm"},
    **{"mi": "miles", "ft": "feet", "foot": "feet", "in": "inches", "inch": "inches"},
    **{"yd": "yards", "acre": "acres", "ha": "hectares", "kg": "kilograms", "g": "grams"},
    **{"lb": "pounds", "C": "degrees Celsius", "F": "degrees Fahrenheit", "K": "kelvins"},
    **{"mph": "miles per hour", "km/h": "kilometres per hour", "nmi": "nautical miles"},
}
RANGES = {"to": "to", "-": "to", "\u2013": "to", "and": "and", "or": "or", "x": "by", "by": "by"}


def iter_articles(dump: Path, shortest: int) -> Iterator[tuple[str, str]]:
    """Title and prose of each article in the dump; redirects and very short ones are left out.

    Args:
        dump: a .bz2 or .gz file. One that ends in the middle of a page ends with the page before.
        shortest: fewest characters of an article's prose. What is left of a disambiguation page
            has less than 300, a stub less than 1000.
    """
    with (bz2.open if dump.suffix == ".bz2" else gzip.open)(dump) as stream:
        for title, markup in _iter_pages(stream):
            if len(text := prose(markup)) >= shortest:
                yield title, text


def _iter_pages(stream: Any) -> Iterator[tuple[str, str]]:
    """Title and markup of each page that is an article; one page at a time is in memory."""
    other_spaces: set[str] = set()  # dumps of 2006 do not state a page's namespace
    events = ElementTree.iterparse(stream, events=("start", "end"))
    _, root = next(events)
    try:
        for event, element in events:
            if event == "end" and element.tag.endswith("}namespace") and element.text:
                other_spaces.add(element.text)
            if event == "start" or not element.tag.endswith("}page"):
                continue
            title = element.findtext("{*}title") or ""
            markup = element.findtext("{*}revision/{*}text") or ""
            is_redirect = element.find("{*}redirect") is not None or REDIRECT.match(markup)
            if not is_redirect and title.partition(":")[0] not in other_spaces:
                yield title, markup
            root.clear()  # otherwise the whole dump stays in memory
    except ElementTree.ParseError as error:
        if error.code not in ENDS_TOO_EARLY:
            raise


def prose(markup: str) -> str:
    """The running text of one article's markup."""
    import mwparserfromhell

    code = mwparserfromhell.parse(REFERENCES.sub("", markup))
    plain = _rendered(_kept(code.nodes))
    lines = (line for line in plain.split("\n") if LISTED not in line)
    return "\n\n".join(filter(None, map(_clean, re.split(r"\n\s*\n", "\n".join(lines)))))


def _kept(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes outside of sections that are not prose."""
    dropped = 0  # the level of the section that is being left out
    for node in nodes:
        if type(node).__name__ == "Heading":
            if node.level <= dropped:
                dropped = 0
            title = _rendered(node.title.nodes).strip().lower()
            if not dropped and node.level in (2, 3) and SKIPPED_SECTIONS.match(title):
                dropped = node.level
        if not dropped:
            yield node


def _rendered(nodes: Iterable[Any]) -> str:
    """The text that these nodes show; what is not in the table below shows nothing."""
    return "".join(RENDERERS[name](n) for n in nodes if (name := type(n).__name__) in RENDERERS)


def _tag(tag: Any) -> str:
    name = str(tag.tag).strip().lower()
    if name in FORMULAS:
        return HOLE
    if name in ("li", "dd", "dt") and tag.wiki_markup:
        return LISTED
    if name == "br":
        return " "
    if name in SKIPPED_TAGS or tag.contents is None:
        return ""
    inside = _rendered(tag.contents.nodes)
    return f"^{inside}" if name == "sup" and re.match(r"[\d\u2212+-]", inside) else inside


def _link(link: Any) -> str:
    if SKIPPED_LINKS.match(str(link.title)):
        return ""
    return _rendered((link.title if link.text is None else link.text).nodes)


def _external_link(link: Any) -> str:
    if not link.brackets:
        return HOLE  # an address is not prose
    return "" if link.title is None else _rendered(link.title.nodes)


def _template(template: Any) -> str:
    """The text that the template prints, or a hole if that is unknown."""
    name = str(template.name).strip().lower().replace("_", " ")
    values = [_rendered(p.value.nodes).strip() for p in template.params if not p.showkey]
    if name in DASHES:
        return " \u2013 "
    if name in ("nbsp", "space", "'", "'s", "-", "!"):
        return {"'": "'", "'s": "'s", "-": "", "!": ""}.get(name, " ")
    if not values:
        return ""
    if name in ("convert", "cvt"):
        return _measure(values)
    if name in ("lang", "transl", "small", "smaller", "nowrap", "nobr", "sc", "abbr", "quote"):
        return values[0] if name in ("abbr", "quote") else values[-1]
    if name in ("nihongo", "angbr", "vanchor", "visible anchor", "vr", "blockquote", "cquote"):
        return values[0]
    if name in ("frac", "fraction", "sfrac"):
        return "/".join(values)
    if name in ("as of", "circa", "c."):
        lead = "c." if name != "as of" else "as of" if template.has("lc") else "As of"
        return f"{lead} {values[0]}"
    is_box = "\n" in str(template) or len(str(template)) > 200  # rather than part of a sentence
    return "" if SILENT.match(name) or is_box else HOLE


def _measure(values: list[str]) -> str:
    """{{convert|5|to|10|km|mi}} prints "5 to 10 kilometres"."""
    link = values[1].removesuffix("(-)") if len(values) > 3 else ""
    if link in RANGES:
        amount, unit = f"{values[0]} {RANGES[link]} {values[2]}", values[3]
    elif len(values) > 1:
        amount, unit = values[0], values[1]
    else:
        return HOLE
    return f"{amount} {UNITS.get(unit, unit)}"


def _clean(paragraph: str) -> str:
    """The complete sentences of a paragraph, or "" if it is not prose."""
    text = re.sub(r"\s+", " ", paragraph.replace("\u200b", "")).strip()
    text = re.sub(r"''+", "", text)
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z\"(])|(?<=[.!?]\")\s+(?=[A-Z\"(])", text)
    not_prose = (HOLE, "://")
    text = " ".join(s for s in sentences if not any(x in s for x in not_prose) and s[-1:] != ":")
    text = re.sub(r"\((?:\s*[;,:])*\s*", "(", text)
    text = re.sub(r"(?:\s*[;,:])*\s*\)", ")", text)
    text = re.sub(r"\((?:or|and|/|\u2013|-)?\)", "", text)
    text = re.sub(r"\s+([,.;:)])(?!\d)", r"\1", text)
    text = re.sub(r",(?:\s*,)+", ",", text)
    text = re.sub(r"\s{2,}", " ", text).strip()
    starts = text[:1].isalnum() or text[:1] in "\"'("
    ends = re.search(r"[.!?][\"')\u201d]*$", text)
    is_prose = starts and ends and len(text.split()) >= 6
    return text if is_prose and not re.search(r"\[\[|\]\]|\{\{|\}\}|\{\||\||</?\w", text) else ""


RENDERERS: dict[str, Callable[[Any], str]] = {
    "Text": str,
    "HTMLEntity": lambda entity: entity.normalize(),
    "Heading": lambda _: "\n\n",
    "Template": _template,
    "Wikilink": _link,
    "ExternalLink": _external_link,
    "Tag": _tag,
}
