"""Small studies of sparsity on tiny random models, made once."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from layerleap.study.result import StudyResult
from layerleap_papers.topk_attention import STUDY, SparsitySettings
from tiny_models import text_file, tiny

SMALL = {
    "n_fit": 4,
    "n_read": 12,
    "held_out": 0.4,
    "max_tokens": 40,
    "budget_tokens": 24,
    "keys": (1, 2, 4, 8, 64),
    "shares": (0.1, 0.5),
    "kl": 0.01,
    "lengths": (128, 256, 512),
    "seeds": 2,
    "tune_seeds": 2,
    "steps": 4,
    "review_steps": 2,
    "tune_steps": 2,
    "tested": 20,
}


@cache
def text() -> str:
    return str(text_file(Path(mkdtemp())))


def settings(**changes: Any) -> SparsitySettings:
    return SparsitySettings(**{"text": text(), **SMALL, **changes})


@cache
def small_study(name: str) -> StudyResult:
    """A study of a tiny model, without training and without the bundled small models."""
    quick = ["attention", "heads", "ffn", "budget", "memory"]
    return STUDY(tiny(name), settings(), sections=quick)


def made() -> StudyResult:
    """The study that the golden file keeps."""
    return small_study("llama")
