"""How long a newcomer waits: for the first `read`, which fits a bank, and for the quick studies."""

import os
import shutil
import tempfile
from pathlib import Path

from common import BUILD, MODEL, SOME_SECTIONS_FAILED, Row, layerleap, timed

from layerleap import zoo
from layerleap.files import cache_root

FIRST_READ = 90.0
QUICK_STUDY = 120.0
QUICK = {
    "shortcuts": (MODEL,),
    "saturation": (MODEL,),
    "embedding": (MODEL,),
    "sparsity": (MODEL,),
    "icl": (MODEL,),
    "stitching": ("small-lm", "--other", "small-lm-2"),
}
SMOKE = ("shortcuts", "saturation")


def run(*, smoke: bool) -> list[Row]:
    """One row for the first `read`, one for each quick study."""
    for name in (MODEL, "wikipedia", "news", *(() if smoke else ("small-lm", "small-lm-2"))):
        zoo.fetch(name)
    rows = [] if smoke else [_first_read()]  # its size is fixed, so there is no small version
    return rows + [_quick(study, smoke) for study in (SMOKE if smoke else QUICK)]


def _first_read() -> Row:
    with tempfile.TemporaryDirectory() as empty:
        for part in cache_root().iterdir():  # all that is cached, but no bank
            if part.name != "banks":
                (Path(empty) / part.name).symlink_to(part)
        env = {**os.environ, "LAYERLEAP_CACHE": empty}
        seconds = timed(lambda: layerleap("read", MODEL, "The capital of France is", env=env))
    return _row("first_read", seconds, FIRST_READ, "layerleap read without a cached bank")


def _quick(study: str, smoke: bool) -> Row:
    out = BUILD / f"bench-quick-{study}"
    shutil.rmtree(out, ignore_errors=True)  # a finished study would be taken up again
    few = ("--fit-texts", "60", "--read-texts", "30") if smoke else ()
    asked = ("study", study, *QUICK[study], "--quick")
    command = (*asked, *few, "--out", str(out))
    seconds = timed(lambda: layerleap(*command, fine=(0, SOME_SECTIONS_FAILED)))
    return _row(f"quick_{study}", seconds, QUICK_STUDY, f"layerleap {' '.join(asked)}")


def _row(name: str, seconds: float, bar: float, note: str) -> Row:
    detail = {"samples": [seconds], "n": 1, "note": f"{note}; model and texts cached"}
    return Row(name, seconds, None, "seconds", at_most=bar, detail=detail)
