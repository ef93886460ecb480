"""What every command shares: one clean line per error, progress on stderr, results on stdout.

In: errors, progress and results. Out: what a person or a pipe sees.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from layerleap.errors import LayerleapError

out = Console()
err = Console(stderr=True)
PLAIN_SECONDS = 15.0  # how often progress is written where there is no terminal to redraw


@contextmanager
def clean_errors() -> Iterator[None]:
    """Our own errors become one red line and exit code 2; an interruption says what is kept."""
    try:
        yield
    except LayerleapError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        err.print(
            "[yellow]stopped.[/] No half-written result was left; fit, tune, study and suitability "
            "keep a checkpoint, from which the same command goes on.",
            soft_wrap=True,
        )
        raise typer.Exit(130) from error
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); closing stderr stops Python's complaint.
        sys.stderr.close()
        raise typer.Exit(0) from None


def tell(message: str) -> None:
    """One line about something slow that starts now."""
    err.print(f"[dim]{escape(message)}[/]", soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """A result for programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


class TerminalProgress:
    """Bars with rate and remaining time on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self.bars: Any = None
        self.tasks: dict[str, Any] = {}
        self.last_line = time.monotonic()
        self.started: dict[str, tuple[float, int]] = {}
        self.latest: dict[str, int] = {}

    def __enter__(self) -> "TerminalProgress":
        if os.environ.get("RANK", "0") != "0":
            self.last_line = float("inf")  # under torchrun one process speaks for all
        elif err.is_terminal:
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self.bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(compact=True),
                console=err,
            )
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()

    def __call__(self, phase: str, done: int, total: int | None, unit: str = "texts") -> None:
        """Take note of one step."""
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
        elif now - self.last_line > PLAIN_SECONDS:
            self.last_line = now
            left = f", about {(total - done) / rate:.0f} s left" if total and rate else ""
            of = f" of {total}" if total else ""
            tell(f"{phase}: {done}{of} {unit}{', ' if speed else ''}{speed}{left}")
