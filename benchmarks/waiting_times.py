"""How long a newcomer waits: for `--help`, the demo, the first `read` and the quick studies.

Models and texts are cached before. The first `read` fits a bank.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import BUILD, MODEL, SOME_SECTIONS_FAILED, Row, demo_arguments, layerleap, median, timed

from layerleap import zoo
from layerleap.files import cache_root

SMALL_MODELS = ("small-lm", "small-lm-2")
QUICK = {
    **dict.fromkeys(("shortcuts", "saturation", "embedding", "sparsity", "icl"), (MODEL,)),
    "stitching": ("small-lm", "--other", "small-lm-2"),
}
SMOKE = ("shortcuts", "saturation")


def run(*, smoke: bool) -> Iterator[Row]:
    """One row for each."""
    for name in (MODEL, "wikipedia", "news", *(() if smoke else SMALL_MODELS)):
        zoo.fetch(name)
    layerleap("--help")  # warm-up: compiles the modules
    samples = [timed(lambda: layerleap("--help")) for _ in range(2 if smoke else 5)]
    yield _row("help_time", samples, 0.5, "layerleap --help, median")
    out = BUILD / ("bench-smoke-demo" if smoke else "bench-demo")
    shutil.rmtree(out, ignore_errors=True)  # a finished study would be taken up again
    seconds = timed(lambda: layerleap(*demo_arguments(out, smoke)))
    yield _row("demo_time", [seconds], 360.0, "make demo's command, everything cached")
    if not smoke:  # its size is fixed, so there is no small version
        yield _first_read()
    for study in SMOKE if smoke else QUICK:
        yield _quick(study, smoke)


def _first_read() -> Row:
    with tempfile.TemporaryDirectory() as empty:
        for part in cache_root().iterdir():  # all that is cached, but no bank
            if part.name != "banks":
                (Path(empty) / part.name).symlink_to(part)
        env = {**os.environ, "LAYERLEAP_CACHE": empty}
        seconds = timed(lambda: layerleap("read", MODEL, "The capital of France is", env=env))
    return _row("first_read", [seconds], 90.0, "layerleap read without a cached bank")


def _quick(study: str, smoke: bool) -> Row:
    out = BUILD / f"bench-quick-{study}"
    shutil.rmtree(out, ignore_errors=True)  # a finished study would be taken up again
    few = ("--fit-texts", "60", "--read-texts", "30") if smoke else ()
    command = ("study", study, *QUICK[study], "--quick")
    whole = (*command, *few, "--out", str(out))
    seconds = timed(lambda: layerleap(*whole, fine=(0, SOME_SECTIONS_FAILED)))
    return _row(f"quick_{study}", [seconds], 120.0, f"layerleap {' '.join(command)}")


def _row(name: str, samples: list[float], at_most: float, note: str) -> Row:
    detail = {"samples": samples, "n": len(samples), "note": note}
    return Row(name, median(samples), None, "seconds", at_most=at_most, detail=detail)
