"""Small studies of saturation on tiny random models, made once."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tiny_models import sentences, tiny

from layerleap.stream.examples import Sampling
from layerleap.study.saturation.study import SaturationSettings, study_saturation

SMALL = {
    "n_fit": 150, "n_read": 240, "k": 3, "draws": 99, "walk_share": 0.5, "permutations": 3,
    "cells": 600, "pairs": 30, "tolerance": 0.2, "prompts": 1,
}  # fmt: skip


def text_file(folder: Path, n: int = 160) -> Path:
    """Records of a few sentences each."""
    path = folder / "text.jsonl"
    lines = [json.dumps({"text": text}) for text in sentences(n)]
    path.write_text("\n".join(lines), encoding="utf8")
    return path


def settings(text: Path | str, **changes: Any) -> SaturationSettings:
    """Everything small."""
    sampling = Sampling(positions="every:2", held_out=0.6)
    return SaturationSettings(**{**SMALL, "text": str(text), "sampling": sampling, **changes})


@cache
def made() -> dict[str, Any]:
    """A whole study of a tiny llama of eight layers."""
    text = text_file(Path(mkdtemp(prefix="layerleap-test-")))
    return study_saturation(tiny("llama", seed=1, num_hidden_layers=8), settings(text))
