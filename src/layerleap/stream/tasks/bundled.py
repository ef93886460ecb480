"""Bundled tasks: mappings written down as facts, and film reviews with their verdict.

In: a name. Out: a `Task`.
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from layerleap.stream.tasks.task import Task, make_task
from layerleap.zoo.download import fetch
from layerleap.zoo.reviews import is_held_out

REVIEWS = "reviews"
LONGEST_REVIEW = 100  # characters: demonstrations have to fit into a context
VERDICTS = ("Negative", "Positive")
RULES: dict[str, Callable[[str], str]] = {
    "capitalised": str.capitalize,
    "upper-case": str.upper,
    "first-letter": lambda word: word[0],
}


@cache
def _facts() -> dict[str, Any]:
    text = files("layerleap.stream.tasks").joinpath("mappings.toml").read_text(encoding="utf8")
    return tomllib.loads(text)


def bundled_names() -> list[str]:
    """The names of the bundled tasks."""
    return [*(name for name, entry in _facts().items() if isinstance(entry, dict)), REVIEWS]


def bundled(name: str) -> Task:
    """The bundled task of that name."""
    if name == REVIEWS:
        return make_task(
            name,
            _reviews(),
            "classes",
            template="Review: {text}\nSentiment:",
            separator="\n\n",
            says="a short film review to its verdict",
        )
    entry = _facts()[name]
    kind = "classes" if "classes" in entry else "mapping"
    return make_task(name, _pairs(entry), kind, says=entry["says"])  # type: ignore[arg-type]


def _pairs(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "rule" in entry:
        yield from ((word, RULES[entry["rule"]](word)) for word in _items(_facts()["words"]))
    for pair in _items(entry.get("pairs", "")):
        text, _, answer = pair.partition(":")
        yield text.strip(), answer.strip()
    for answer, texts in entry.get("classes", {}).items():
        yield from ((text, answer) for text in _items(texts))


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(",") if item.strip()]


def _reviews() -> Iterator[tuple[str, str]]:
    """Short reviews that no bundled model was trained on."""
    with fetch(REVIEWS).open(encoding="utf8") as lines:
        for record in map(json.loads, lines):
            text = record["text"]
            if len(text) <= LONGEST_REVIEW and "\n" not in text and is_held_out(text):
                yield text, VERDICTS[record["label"]]
