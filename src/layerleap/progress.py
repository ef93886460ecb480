"""How long work reports on itself: one small callable, so that no stage knows a terminal."""

import sys
from typing import Protocol


class Progress(Protocol):
    """Called now and then with the phase, what is done and, if known, how much there is."""

    def __call__(self, phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        """Take note of one step."""


def silent(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
    """Say nothing."""


def peak_memory() -> float | None:
    """The most memory that this process has held so far, in MiB; None where nobody keeps count."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    per_mib = 2**20 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mib, 1)
