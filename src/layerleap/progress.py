"""Progress reports: a small callable, so that no stage depends on a terminal."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

FIRST_SECONDS = 4.0  # when progress is first written where there is nothing to redraw
PLAIN_SECONDS = 15.0  # and how often from then on


class Progress(Protocol):
    """Called now and then with the phase, how much is done and, if known, the total."""

    def __call__(self, phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        """Report one step."""


def silent(phase: str, done: int, total: int | None, unit: str = "texts") -> None:
    """Report nothing."""


@contextmanager
def reporting(progress: Progress | bool) -> Iterator[Progress]:
    """`progress` itself. True is bars on a terminal and in notebooks, False is nothing."""
    if not isinstance(progress, bool):
        yield progress
        return
    from rich.console import Console

    console = Console(stderr=True)
    if progress and (console.is_terminal or console.is_jupyter):
        with Bars(console) as bars:
            yield bars
    else:
        yield silent


class Bars:
    """A bar per phase on a terminal and in notebooks; elsewhere, a line from time to time."""

    def __init__(self, console: Any, write_line: Callable[[str], None] = lambda line: None) -> None:
        """`write_line` is called with the lines where there is nothing to redraw."""
        self.console, self.write_line = console, write_line
        self.bars: Any = None
        self.tasks: dict[str, Any] = {}
        self.last_line, self.has_spoken = time.monotonic(), False
        self.started: dict[str, tuple[float, int]] = {}
        self.latest: dict[str, int] = {}

    def __enter__(self) -> "Bars":
        if os.environ.get("RANK", "0") != "0":
            self.last_line = float("inf")  # under torchrun only the first process reports
        elif self.console.is_terminal or self.console.is_jupyter:
            from rich import progress as rich

            self.bars = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(bar_width=None),
                rich.MofNCompleteColumn(),
                rich.TextColumn("{task.fields[unit]}"),
                rich.TextColumn("{task.fields[rate]}"),
                rich.TimeRemainingColumn(compact=True),
                console=self.console,
            )
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()

    def __call__(self, phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        """Show one step of progress."""
        now = time.monotonic()
        if done < self.latest.get(phase, done + 1):
            self.started[phase] = (now, done)  # new, or the same kind of work begun again
        self.latest[phase] = done
        began, first = self.started[phase]
        rate = (done - first) / (now - began) if now > began else 0.0
        speed = f"{rate:.0f}/s" if rate >= 10 else f"{rate:.1f}/s" if rate else ""
        if self.bars is not None:
            if phase not in self.tasks:
                self.tasks[phase] = self.bars.add_task(phase, total=total, unit=unit, rate="")
            self.bars.update(self.tasks[phase], completed=done, total=total, rate=speed)
        elif self._is_due(now - self.last_line, rate):
            self.last_line, self.has_spoken = now, True
            left = f", about {(total - done) / rate:.0f} s left" if total and rate else ""
            of = f" of {total}" if total else ""
            self.write_line(f"{phase}: {done}{of} {unit}{', ' if speed else ''}{speed}{left}")

    def _is_due(self, silence: float, rate: float) -> bool:
        """True if a line is due: the first one soon, once there is a rate to estimate from."""
        is_first = not self.has_spoken and rate > 0
        return silence > (FIRST_SECONDS if is_first else PLAIN_SECONDS)
