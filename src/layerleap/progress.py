"""Progress reports: a small callable, so that no stage depends on a terminal."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then with the phase, how much is done and, if known, the total."""

    def __call__(self, phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        """Report one step."""


def silent(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
    """Report nothing."""
