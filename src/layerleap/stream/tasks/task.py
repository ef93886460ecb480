"""Task: examples with answers, and the template that turns them into a prompt.

In: texts with labels. Out: a `Task`, checked: it has examples, and at least two answers.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

from layerleap.errors import BadSettings, BadText, check_choice

Kind = Literal["classes", "mapping"]
TEXT = "{text}"
FEW_CLASSES = 20  # more answers than this are not classes, unless the task says so


@dataclass(frozen=True)
class Example:
    """A text and its answer."""

    text: str
    answer: str


@dataclass(frozen=True, repr=False)
class Task:
    """Examples, and how each becomes a prompt.

    The prompt of an example is the template with its text, and ends where the answer begins. A
    demonstration is the prompt, a space and the answer. In a context, demonstrations are separated
    by `separator`. Of a task with classes, a prediction is the best of its labels; of a mapping,
    the best of all tokens.
    """

    name: str
    examples: tuple[Example, ...]
    kind: Kind
    template: str = "{text} ->"
    separator: str = "\n"
    says: str = ""  # what it asks, in words

    def __post_init__(self) -> None:
        check_choice(self.kind, Kind, "kind")
        if self.template.count(TEXT) != 1:
            raise BadSettings(
                f"template {self.template!r} has {self.template.count(TEXT)} places for the text; "
                "expected {text} once, as in 'Review: {text}\\nSentiment:'"
            )
        if self.template != self.template.rstrip():
            raise BadSettings(
                f"template {self.template!r} ends with a space; leave it out: the answer comes "
                "with its own"
            )
        if not self.examples:
            raise BadText(f"task {self.name!r} has no labelled example; expected at least two")
        if len(self.labels) < 2:
            raise BadText(
                f"all {len(self.examples)} examples of task {self.name!r} have the answer "
                f"{self.labels[0]!r}; expected at least two different answers"
            )

    def __repr__(self) -> str:
        return (
            f"Task({self.name}: {len(self.examples):,} examples, {len(self.labels):,} "
            f"{'classes' if self.kind == 'classes' else 'answers'}, {self.template!r})"
        )

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The different answers, the most frequent first."""
        return tuple(label for label, _ in Counter(e.answer for e in self.examples).most_common())

    def prompt(self, text: str) -> str:
        """The prompt of one text, which ends where the answer begins."""
        return self.template.replace(TEXT, text)

    @cached_property
    def digest(self) -> str:
        """Differs if anything differs that prompts depend on."""
        parts = [self.kind, self.template, self.separator]
        parts += [f"{e.text}\0{e.answer}" for e in self.examples]
        return blake2b("\1".join(parts).encode("utf8", "surrogatepass"), digest_size=8).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """What it is, without its examples, as plain JSON values."""
        return {
            "task": self.name,
            "says": self.says,
            "kind": self.kind,
            "template": self.template,
            "examples": len(self.examples),
            "labels": len(self.labels),
            "digest": self.digest,
        }


def make_task(
    name: str, pairs: Iterable[tuple[str, str]], kind: Kind | None = None, **how: Any
) -> Task:
    """A task of (text, answer) pairs; a text that occurs again is left out.

    Args:
        name: its name.
        pairs: texts and answers.
        kind: classes or a mapping; by default classes, if there are few different answers.
        how: `template`, `separator` and `says`; None leaves the default.
    """
    known: dict[str, str] = {}
    for text, answer in pairs:
        known.setdefault(text, answer)
    examples = tuple(Example(text, answer) for text, answer in known.items())
    n_labels = len(set(known.values()))
    is_few = n_labels <= min(FEW_CLASSES, len(examples) // 2)
    settings = {key: value for key, value in how.items() if value is not None}
    return Task(name, examples, kind or ("classes" if is_few else "mapping"), **settings)
