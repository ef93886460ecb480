"""Wikipedia markup converted to plain prose.

In: a MediaWiki XML dump (bz2).
Out: (title, text) of each article: whole sentences, paragraphs separated by a blank line.
Not here: downloading the dump and writing the result (`download.py`).

Lists, tables, headings, captions and references are dropped. So is every sentence with a formula
or an unknown template: a model should not be judged on text with holes in it.
"""

import bz2
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHORTEST_ARTICLE = 300  # characters; the remains of a disambiguation page are shorter
HOLE, LISTED = "\ue000", "\ue001"  # private-use characters that no article contains

SKIPPED_SECTIONS = re.compile(
    r"(external links|see also|further reading|bibliography|selected bibliography|sources|"
    r"works cited|citations|gallery|filmography|discography|works|publications|"
    r"((explanatory )?notes|references|footnotes)( and (notes|references|footnotes))?)$"
)
SKIPPED_TAGS = ("table", "ref", "references", "gallery", "timeline", "source", "pre", "score")
FORMULAS = ("math", "chem", "ce", "hiero")
# Removed before parsing: there are thousands, and each replacement costs a search.
REFERENCES = re.compile(
    r"<!--.*?-->|<ref\b[^<>]*/>|<ref\b[^<>]*>.*?</ref\s*>", re.DOTALL | re.IGNORECASE
)
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


def iter_articles(dump: Path) -> Iterator[tuple[str, str]]:
    """Title and prose of each article in the dump; redirects and very short ones are left out."""
    with bz2.open(dump) as stream:
        for _, element in ElementTree.iterparse(stream):
            if not element.tag.endswith("}page"):
                continue
            is_article = element.findtext("{*}ns") == "0" and element.find("{*}redirect") is None
            title = element.findtext("{*}title") or ""
            markup = element.findtext("{*}revision/{*}text") or ""
            element.clear()  # otherwise the whole dump stays in memory
            if is_article and len(text := prose(markup)) >= SHORTEST_ARTICLE:
                yield title, text


def prose(markup: str) -> str:
    """The running text of one article's markup."""
    import mwparserfromhell

    code = mwparserfromhell.parse(REFERENCES.sub("", markup))
    _drop_sections(code)
    _replace_each(code, code.filter_tags(matches=_is_dropped_tag), _in_place_of_tag)
    # Templates can be nested; the inner ones appear once the outer one is replaced.
    while code.filter_templates():
        outer = code.filter_templates(recursive=code.RECURSE_OTHERS)
        _replace_each(code, outer, _in_place_of_template)
    _replace_each(code, code.filter_wikilinks(), _in_place_of_link)
    _replace_each(code, code.filter_tags(), _in_place_of_inline_tag)
    plain = code.strip_code(normalize=True, collapse=False)
    return "\n\n".join(filter(None, map(_clean, re.split(r"\n\s*\n", _unlisted(plain)))))


def _drop_sections(code: Any) -> None:
    for section in code.get_sections(levels=[2, 3]):
        headings = section.filter_headings()
        if headings and SKIPPED_SECTIONS.match(_plain(headings[0].title)):
            _replace(code, section, "")
    for heading in code.filter_headings():
        _replace(code, heading, "\n\n")


def _plain(title: Any) -> str:
    return str(title.strip_code()).strip().lower()


def _replace_each(code: Any, nodes: list[Any], text_for: Callable[[Any], str | None]) -> None:
    """Replace each node by `text_for(node)`; None keeps the node."""
    for node in nodes:
        if (text := text_for(node)) is not None:
            _replace(code, node, text)


def _replace(code: Any, node: Any, text: str) -> None:
    try:
        code.replace(node, text)
    except ValueError:  # it was inside a node that is already replaced
        return


def _is_dropped_tag(tag: Any) -> bool:
    name = str(tag.tag).strip().lower()
    return name in SKIPPED_TAGS or name in FORMULAS


def _in_place_of_tag(tag: Any) -> str:
    return HOLE if str(tag.tag).strip().lower() in FORMULAS else ""


def _in_place_of_inline_tag(tag: Any) -> str | None:
    name = str(tag.tag).strip().lower()
    if name in ("li", "dd", "dt") and tag.wiki_markup:
        return LISTED
    if name == "br":
        return " "
    if name == "sup":
        inside = str(tag.contents)
        return f"^{inside}" if re.match(r"[\d\u2212+-]", inside) else inside
    return None


def _in_place_of_link(link: Any) -> str | None:
    return "" if SKIPPED_LINKS.match(str(link.title)) else None


def _in_place_of_template(template: Any) -> str:
    """The text that the template prints, or a hole if that is unknown."""
    name = str(template.name).strip().lower().replace("_", " ")
    values = [str(p.value).strip() for p in template.params if not p.showkey]
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
    if SILENT.match(name) or _is_box(template):
        return ""
    return HOLE


def _is_box(template: Any) -> bool:
    """True if the template is a box rather than part of a sentence."""
    return "\n" in str(template) or len(str(template)) > 200


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


def _unlisted(plain: str) -> str:
    return "\n".join(line for line in plain.split("\n") if LISTED not in line)


def _clean(paragraph: str) -> str:
    """The complete sentences of a paragraph, or "" if it is not prose."""
    text = re.sub(r"\s+", " ", paragraph.replace("\u200b", "")).strip()
    text = re.sub(r"''+", "", text)
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z\"(])|(?<=[.!?]\")\s+(?=[A-Z\"(])", text)
    text = " ".join(s for s in sentences if HOLE not in s and not s.endswith(":"))
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
