"""Terminal output: one line per error, progress on stderr, results on stdout."""

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
    """Print expected errors as one red line (exit code 2); after Ctrl-C, say what was kept."""
    try:
        yield
    except LayerleapError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        err.print(
            "[yellow]stopped.[/] No half-written result was left. fit, tune, study and suitability "
            "keep a checkpoint: run the same command again to continue.",
            soft_wrap=True,
        )
        raise typer.Exit(130) from error
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); closing stderr stops Python's complaint.
        sys.stderr.close()
        raise typer.Exit(0) from None


def tell(message: str) -> None:
    """Print one line before something slow."""
    err.print(f"[dim]{escape(message)}[/]", soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """Print a result for programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


class TerminalProgress:
    """Progress bars on a terminal; elsewhere, a line from time to time."""

    def __init__(self) -> None:
        self.bars: Any = None
        self.tasks: dict[str, Any] = {}
        self.last_line = time.monotonic()
        self.started: dict[str, tuple[float, int]] = {}
        self.latest: dict[str, int] = {}

    def __enter__(self) -> "TerminalProgress":
        if os.environ.get("RANK", "0") != "0":
            self.last_line = float("inf")  # under torchrun only the first process reports
        elif err.is_terminal:
            from rich import progress as rich

            self.bars = rich.Progress(
                rich.TextColumn("{task.description}"), rich.BarColumn(bar_width=None),
                rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[unit]}"),
                rich.TextColumn("{task.fields[rate]}"), rich.TimeRemainingColumn(compact=True),
                console=err,
            )  # fmt: skip
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
        elif now - self.last_line > PLAIN_SECONDS:
            self.last_line = now
            left = f", about {(total - done) / rate:.0f} s left" if total and rate else ""
            of = f" of {total}" if total else ""
            tell(f"{phase}: {done}{of} {unit}{', ' if speed else ''}{speed}{left}")
