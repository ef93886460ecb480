"""Loading a task: a bundled one, or labelled examples of a file or of a data set of the hub.

Bundled are mappings written down as facts, and film reviews with their verdict.

In: a name, a file (.jsonl, .csv, .tsv, .parquet, or .gz of one), "org/name:config:split", or pairs.
Out: a `Task`.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from layerleap.arguments import checked
from layerleap.errors import BadSettings, BadText, did_you_mean
from layerleap.stream.records import (
    RECORD_SUFFIXES,
    Record,
    kind_of,
    may_be_hub_name,
    opened,
    records_of,
    records_of_hub,
)
from layerleap.stream.tasks.task import Kind, Task, make_task
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
MOST_EXAMPLES = 20_000  # read of a data set: far more than any draw needs


def names() -> list[str]:
    """The names of the bundled tasks."""
    return [*(name for name, entry in _facts().items() if isinstance(entry, dict)), REVIEWS]


@checked
def load(
    source: Task | str | Path | Iterable[tuple[str, str]],
    *,
    template: str | None = None,
    separator: str | None = None,
    field: str = "text",
    label: str = "label",
    labels: Mapping[str, str] | None = None,
    kind: Kind | None = None,
) -> Task:
    """A task, ready to be encoded for a model.

        ll.tasks.load("capitals")
        ll.tasks.load("mine.csv", template="{text} Verdict:", labels={"0": "bad", "1": "good"})

    Args:
        source: a bundled name, a file, a data set of the hub (its first 20,000 examples), or
            (text, answer) pairs. A bundled name wins over a file of that name: write ./capitals for
            the file.
        template: how a text becomes a prompt, with {text} in it; it ends where the answer begins.
        separator: what stands between demonstrations.
        field: the column or key of the text.
        label: the column or key of the answer.
        labels: the words that stand for its values, such as {"0": "Negative"}; for all answers.
        kind: "classes" compares the labels with each other, "mapping" all tokens. By default,
            classes if there are few different answers.
    """
    how = {"template": template, "separator": separator}
    labels = None if labels is None else {str(value): word for value, word in labels.items()}
    if isinstance(source, Task):
        settings = {**how, "labels": labels, "kind": kind}
        if extra := [name for name, value in settings.items() if value]:
            raise BadSettings(
                f"{extra[0]} is given for a task that is made already; give it when you load it"
            )
        return source
    if not isinstance(source, str | Path):
        return make_task("pairs", _checked(source, labels), kind, **how)
    if source in names():
        task = _bundled(str(source))
        examples = [(e.text, _word("an example", e.answer, labels)) for e in task.examples]
        changes = {
            key: getattr(task, key) if value is None else value for key, value in how.items()
        }
        return make_task(task.name, examples, kind or task.kind, says=task.says, **changes)
    pairs = (_pair(record, field, label, labels) for record in _records(source, label))
    name = Path(source).stem if Path(source).expanduser().is_file() else str(source)
    return make_task(name, (pair for pair in pairs if pair), kind, **how)


def parse_labels(text: str) -> dict[str, str]:
    """The words that stand for labels, as typed: "0=Negative,1=Positive"."""
    words: dict[str, str] = {}
    for part in text.split(","):
        value, sign, word = (side.strip() for side in part.partition("="))
        if not (value and sign and word):
            raise BadSettings(
                f"labels are {text!r}; expected values and their words, such as 0=bad,1=good"
            )
        words[value] = word
    return words


def _checked(pairs: Iterable[Any], labels: Mapping[str, str] | None) -> Iterator[tuple[str, str]]:
    for number, pair in enumerate(pairs, start=1):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(isinstance(part, str) and part.strip() for part in pair):
            raise BadText(
                f"item {number} is {pair!r:.60}; expected a text and its answer, both not empty"
            )
        yield pair[0].strip(), _word(f"item {number}", pair[1].strip(), labels)


def _word(where: str, answer: str, labels: Mapping[str, str] | None) -> str:
    """The word that stands for an answer."""
    if labels is not None and answer not in labels:
        raise BadText(
            f"{where} has the label {answer!r}, for which labels= has no word; it has "
            f"{', '.join(map(repr, labels))}"
        )
    return answer if labels is None else labels[answer]


def _records(source: str | Path, label: str) -> Iterator[Record]:
    path = Path(source).expanduser()
    if path.is_file():
        if kind_of(path) not in RECORD_SUFFIXES:
            raise BadText(
                f"{source} is not a file of labelled examples; expected "
                f"{', '.join(RECORD_SUFFIXES[:2])}, .csv or .tsv with a text and a label each"
            )
        with opened(path) as stream:
            yield from records_of(stream, path, path.name)
        return
    if isinstance(source, Path) or not may_be_hub_name(str(source)):
        raise BadText(
            f"there is no task or file {source}; bundled tasks are {', '.join(names())}"
            f"{did_you_mean(source, names())}"
        )
    for number, record in enumerate(records_of_hub(str(source), names())):
        if number >= MOST_EXAMPLES:
            return
        yield record


def _pair(
    record: Record, field: str, label: str, labels: Mapping[str, str] | None
) -> tuple[str, str] | None:
    """The text and the answer of a record; None if its text is empty."""
    text = record[field]
    if label not in record.fields:
        raise BadText(
            f"{record.where} has no label: there is no field {label!r} among "
            f"{', '.join(map(str, record.fields))}; name the one with the answer (label=...)"
        )
    value = record.fields[label]
    answer = str(value).strip() if isinstance(value, str | int | float) else ""
    if not answer or value != value:  # NaN is what tables have where nothing was written
        what = "NaN" if answer else "empty"
        raise BadText(f"{record.where} has no label ({label!r} is {what}); expected an answer")
    word = _word(record.where, answer, labels)
    is_text = isinstance(text, str) and text.strip()
    return (" ".join(text.split()), word) if is_text else None


@cache
def _facts() -> dict[str, Any]:
    text = files("layerleap.stream.tasks").joinpath("mappings.toml").read_text(encoding="utf8")
    return tomllib.loads(text)


def _bundled(name: str) -> Task:
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
