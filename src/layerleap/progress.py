"""How long work reports on itself: one small callable, so that no stage knows a terminal."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then with the phase, what is done and, if known, how much there is."""

    def __call__(self, phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        """Take note of one step."""


def silent(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
    """Say nothing."""
