"""What a standalone page says around the results on it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PageHead:
    """What a standalone page says around its results."""

    kicker: str  # the kind of page
    title: tuple[str, str, str]  # words before the model's name, the name, words after it
    facts: Sequence[str]
    heading: str
    lead: str  # how to read the page
    text: str = ""  # what the model was given
