"""How long a user waits: for the demo (model and texts already cached), and for `--help`."""

import shutil
from pathlib import Path

from common import BUILD, MODEL, Row, demo_arguments, layerleap, median, timed

from layerleap import zoo

DEMO_FOLDER = BUILD / "bench-demo"


def run(*, smoke: bool) -> list[Row]:
    """One row for the help page, one for the demo."""
    out = DEMO_FOLDER.with_name("bench-smoke-demo") if smoke else DEMO_FOLDER
    return [_help(smoke), _demo(out, smoke)]


def _help(smoke: bool) -> Row:
    layerleap("--help")  # warm-up: compiles the modules
    samples = [timed(lambda: layerleap("--help")) for _ in range(2 if smoke else 5)]
    return Row(
        "help_time",
        median(samples),
        None,
        "seconds",
        at_most=0.5,
        detail={"samples": samples, "n": len(samples), "note": "layerleap --help, median"},
    )


def _demo(out: Path, smoke: bool) -> Row:
    zoo.fetch(MODEL)
    for text in ("wikipedia", "news"):
        zoo.fetch(text)
    shutil.rmtree(out, ignore_errors=True)  # a finished study would be taken up again
    arguments = demo_arguments(out, smoke)
    seconds = timed(lambda: layerleap(*arguments))
    return Row(
        "demo_time",
        seconds,
        None,
        "seconds",
        at_most=360.0,
        detail={"samples": [seconds], "n": 1, "note": "make demo's command, everything cached"},
    )
