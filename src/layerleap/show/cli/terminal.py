"""Terminal output: one line per error, progress on stderr, results on stdout."""

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from typer import Exit

from layerleap.errors import LayerleapError, LayerleapWarning
from layerleap.progress import Bars

out = Console()
err = Console(stderr=True)


class _Lines(logging.Handler):
    """Prints what the library logs."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(record.getMessage())


LINES = _Lines(logging.INFO)


@contextmanager
def _log_shown() -> Iterator[None]:
    """Print the library's log inside a `with` block, each line once."""
    logger = logging.getLogger("layerleap")
    if LINES in logger.handlers:
        yield
        return
    level = logger.level
    logger.addHandler(LINES)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(LINES)
        logger.setLevel(level)


@contextmanager
def clean_errors() -> Iterator[None]:
    """Print expected errors as one red line (exit code 2); after Ctrl-C, say what was kept."""
    try:
        with warnings.catch_warnings(), _log_shown():
            warnings.simplefilter("always", LayerleapWarning)
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            yield
    except LayerleapError as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise Exit(2) from error
    except KeyboardInterrupt as error:
        err.print(
            "[yellow]stopped.[/] No half-written result was left. fit, tune, finetune, index, "
            "patch and study keep a checkpoint: run the same command again to continue.",
            soft_wrap=True,
        )
        raise Exit(130) from error
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); closing stderr stops Python's complaint.
        sys.stderr.close()
        raise Exit(0) from None


def _show_warning(otherwise: Any, message: Any, category: type[Warning], *where: Any) -> None:
    """Print our own warnings as one line, without the place in the code."""
    if issubclass(category, LayerleapWarning):
        err.print(f"[yellow]warning:[/] {escape(str(message))}", soft_wrap=True, highlight=False)
    else:
        otherwise(message, category, *where)


def tell(message: str) -> None:
    """Print one line before something slow."""
    err.print(f"[dim]{escape(message)}[/]", soft_wrap=True, highlight=False)


def print_json(value: Any) -> None:
    """Print a result for programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def show(result: Any, *, json: bool, **about: Any) -> None:
    """Print a result for people; or for programs, after what else is to be known `about` it."""
    if json:
        print_json({**about, **result.to_dict()} if about else result.to_dict())
    else:
        out.print(result)


def write_html(path: Path | None, head: Callable[[], Any], *results: Any) -> None:
    """Write results as a page, if one was asked for."""
    if path is not None:
        from layerleap.results.page import write_page

        tell(f"page: {write_page(path, head(), *results)}")


# Progress bars on a terminal; elsewhere, a line from time to time.
TerminalProgress = partial(Bars, err, tell)
