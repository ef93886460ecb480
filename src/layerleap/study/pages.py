"""Pages: the words and looks of a study, as data in a file `page.toml` beside its code.

In: that file. Out: sections, claims, figures and tables, which code gives their rows and tests.

    [sections.norms]
    title = "How long are states?"

    [claims.growing]
    text = "Norms grow from layer to layer."
    why = "yes if the interval of every step is above 0"

    [figures.norms]
    title = "Norm by layer"
    how = "Mean length of a state."
    y = { label = "norm", low = 0 }

    [tables.norms-table]
    caption = "Norms by layer"
    columns = ["layer", { key = "value", title = "norm", interval = true }]

    [findings.longest]
    text = "States are longest at layer {row[layer]}: {row:.1f}."
    headline = true

Keys are those of `Section`, `Claim`, `Figure`, `Table` and `Finding`. An entry may be `like`
another of its kind, and say only what differs. Line breaks in texts do not count. Fields in braces
are filled in as `words` says. With `model = { reads = "sound" }`, a claim is about those alone.
"""

import string
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from layerleap.study.claims import Answer, Claim, Each, Verdict, at_every, untested
from layerleap.study.engine import Box, Section, Study
from layerleap.study.figures import LENSES, Axis, Figure, Line, Mark
from layerleap.study.result import Finding, Headline, Row, Said, StudyResult
from layerleap.study.tables import P_VALUE, Column, Table, in_words, percent

# Columns that are written alike everywhere.
COLUMNS = {
    "p": P_VALUE,
    "rank": Column("rank", form="{:.0f}"),
    "rows": Column("rows", form="{:,.0f}"),
}
VALUES = {"true": True, "false": False, "none": None}  # keys of a file are texts
Rows = Callable[[StudyResult], Iterable[Row]]
When = Callable[[StudyResult], bool]
# What a test gives: its answer and the values that the words of the claim name, or a verdict.
Tested = Verdict | tuple[Answer, Mapping[str, Any]]
Test = Callable[[StudyResult], Tested]


class Page:
    """What a `page.toml` says. `Page(__file__)` reads the one beside a module."""

    def __init__(self, file: str) -> None:
        self.entries = _entries(Path(file).with_name("page.toml"))

    def _entry(self, kind: str, key: str) -> dict[str, Any]:
        """One entry; it may be `like` another of its kind, and say only what differs."""
        entry = dict(self.entries[kind][key])
        return {**self._entry(kind, entry.pop("like")), **entry} if "like" in entry else entry

    def study(self, **more: Any) -> Study[Any]:
        """The study, with its settings, context and sections."""
        entry = {key: value for key, value in self.entries["study"].items() if key != "about"}
        return Study(**{**entry, "about": self.about, **more})

    def about(self, result: StudyResult, **values: Any) -> Iterator[str]:
        """Paragraphs on what is measured. One may be for models of some kind, as `reads` says."""
        for entry in self.entries["study"].get("about", ()):
            needed = {key: value for key, value in entry.items() if key != "text"}
            if needed.items() <= result.model.items():
                yield words(entry["text"], **result.model, **values)

    def section(self, key: str, run: Callable[[Any], Any], **more: Any) -> Section:
        """A section: what it runs, finds and shows."""
        return Section(key=key, run=run, **self.entries["sections"][key], **more)

    def box(self, name: str, when: When = lambda _: True) -> Box:
        """The explanation of a lens or method."""
        return Box(name, **self._entry("boxes", name), when=when)

    def say(self, key: str, /, **values: Any) -> Said:
        """A finding with these values filled in."""
        entry = self._entry("findings", key)
        text = words(entry["text"], **values)
        if "under" in entry:
            return Finding(text, entry["under"], entry.get("headline", False))
        return Headline(text) if entry.get("headline") else text

    def claim(self, key: str, when: When = lambda _: True) -> Callable[[Test], Claim]:
        """A decorator that makes a claim of the function that tests it."""
        entry = self._entry("claims", key)
        when = _when(entry, when)

        def made(test: Test) -> Claim:
            def tested(result: StudyResult) -> Verdict:
                verdict = test(result)
                if isinstance(verdict, Verdict):
                    return verdict
                answer, values = verdict
                seen = words(entry.get("seen", "{groups}"), **values)
                return Verdict(answer, seen, words(entry["why"], **values))

            return Claim(entry["text"], tested, when)

        return made

    def each(
        self,
        key: str,
        rows: Rows,
        ask: Callable[[Mapping[str, Any]], Answer] | None = None,
        together: Callable[[Iterable[Answer]], Answer] | None = None,
        when: When = lambda _: True,
    ) -> Claim:
        """A claim that asks the same of every row, as `Each` does."""
        entry = self._entry("claims", key)
        when, text = _when(entry, when), entry.pop("text")
        return Claim(text, Each(rows, ask=ask, together=together, **entry), when)

    def groups(
        self, key: str, answers: Callable[[StudyResult], Mapping[str, Sequence[Answer]]]
    ) -> Claim:
        """A claim that must hold at every place of every group; `each` lists the groups."""
        entry = self._entry("claims", key)

        def test(result: StudyResult) -> Tested:
            by_group = {name: group for name, group in answers(result).items() if group}
            if not by_group:
                return untested(entry["missing"])
            listed = (
                words(entry["each"], name=name, yes=a.count("yes"), no=a.count("no"), n=len(a))
                for name, a in by_group.items()
            )
            every = [answer for group in by_group.values() for answer in group]
            return at_every(every), {"groups": "; ".join(listed)}

        return self.claim(key)(test)

    def figure(self, key: str, rows: Rows, **more: Any) -> Figure:
        """A figure of these rows."""
        entry = self._entry("figures", key)
        entry |= {name: Axis(**entry[name]) for name in ("x", "y", "value") if name in entry}
        entry["lines"] = {name: _line(look) for name, look in entry.get("lines", {}).items()}
        marks = [Mark(**mark) for mark in entry.get("marks", ())]
        entry["marks"] = lambda _: marks
        return Figure(**{**entry, "key": key, "rows": rows, **more})

    def table(self, key: str, rows: Rows, **more: Any) -> Table:
        """A table of these rows."""
        entry = self._entry("tables", key)
        for name in ("columns", "cells"):
            entry[name] = tuple(_column(column) for column in entry.get(name, ()))
        return Table(**{**entry, "key": key, "rows": rows, **more})


def _when(entry: dict[str, Any], when: When) -> When:
    """Whether a claim is about a model: what the code says, or what the entry needs of it."""
    needed = entry.pop("model", None)
    return when if needed is None else lambda result: needed.items() <= result.model.items()


class _Words(string.Formatter):
    def format_field(self, value: Any, form: str) -> str:
        if isinstance(value, Mapping):
            return in_words(value, form or ".2f")
        if form in ("%", "1 %"):
            return percent(value, 1 if form == "1 %" else None)
        return str(super().format_field(value, form))


def words(text: str, /, **values: Any) -> str:
    """A text with its fields filled in.

    `{row:.2f}` is the value of a row with its interval, `{row[key]}` one of its columns, and
    `{share:%}` or, with a digit more, `{share:1 %}` a share in percent.
    """
    return _Words().format(text, **values)


@cache  # each module of a study asks for the same file
def _entries(path: Path) -> dict[str, Any]:
    entries: dict[str, Any] = _joined(tomllib.loads(path.read_text("utf8")))
    return entries


def _joined(value: Any) -> Any:
    """The same entries, with the lines of every text of several lines joined."""
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_joined(item) for item in value]
    if isinstance(value, str) and "\n" in value:
        return "\n\n".join(" ".join(part.split()) for part in value.split("\n\n"))
    return value


def _line(look: dict[str, Any]) -> Line:
    """A line, which may look like that of a lens."""
    look = dict(look)
    return replace(LENSES[look.pop("like")], **look) if "like" in look else Line(**look)


def _column(entry: str | dict[str, Any]) -> Column:
    if isinstance(entry, str):
        return COLUMNS.get(entry, Column(entry))
    entry = dict(entry)
    if entry.pop("interval", False):
        entry |= {"low": "low", "high": "high"}
    for name in {"words", "colours"} & entry.keys():
        entry[name] = {VALUES.get(key, key): word for key, word in entry[name].items()}
    return Column(**entry)
