"""Small studies of sparsity on tiny random models, made once."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from saturation_studies import text_file
from tiny_models import tiny

from layerleap.study.result import StudyResult
from layerleap.study.sparsity import STUDY, SparsitySettings

SMALL = {
    "n_fit": 4, "n_read": 12, "held_out": 0.4, "unit": "document", "max_tokens": 40,
    "budget_tokens": 24, "keys": (1, 2, 4, 8, 64), "shares": (0.1, 0.5), "kl": 0.002,
    "lengths": (32, 64, 128), "seeds": 2, "steps": 4, "tune_steps": 2, "tested": 20,
}  # fmt: skip


def settings(**changes: Any) -> SparsitySettings:
    return SparsitySettings(**{"text": str(text_file(Path(mkdtemp()))), **SMALL, **changes})


@cache
def small_study(name: str = "llama", sections: tuple[str, ...] | None = None) -> StudyResult:
    """A study of a tiny model, without training and without the bundled small models."""
    usual = ("attention", "heads", "ffn", "budget", "memory")
    return STUDY(tiny(name), settings(), sections=sections or usual)
