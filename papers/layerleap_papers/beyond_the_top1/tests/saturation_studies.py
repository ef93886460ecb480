"""Small studies of saturation on tiny random models, made once."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from layerleap.study.result import StudyResult
from layerleap_papers.beyond_the_top1 import STUDY, SaturationSettings
from tiny_models import text_file, tiny

SMALL = {
    "n_fit": 150,
    "n_read": 240,
    "k": 3,
    "draws": 99,
    "walk_share": 0.5,
    "permutations": 3,
    "cells": 600,
    "pairs": 30,
    "tolerance": 0.2,
    "prompts": 1,
    "positions": "every:2",
    "held_out": 0.6,
}


def settings(text: Path | str, **changes: Any) -> SaturationSettings:
    """Everything small."""
    return SaturationSettings(**{**SMALL, "text": str(text), **changes})


@cache
def made() -> StudyResult:
    """A whole study of a tiny llama of eight layers."""
    text = text_file(Path(mkdtemp(prefix="layerleap-test-")))
    return STUDY(tiny("llama", seed=1, num_hidden_layers=8), settings(text))
