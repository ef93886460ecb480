"""Small studies of embedding space on tiny random models, made once."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from layerleap.study.result import StudyResult
from layerleap_papers.embedding_space import STUDY, EmbeddingSettings
from tiny_models import text_file, tiny

SMALL = {"n_fit": 60, "n_read": 30, "held_out": 0.4, "kept_rows": 24, "control_vectors": 16}


@cache
def text() -> str:
    """A file of a few records."""
    return str(text_file(Path(mkdtemp(prefix="layerleap-test-")), 60))


def settings(**changes: Any) -> EmbeddingSettings:
    """Everything small."""
    return EmbeddingSettings(**{**SMALL, "text": text(), **changes})


@cache
def made() -> StudyResult:
    """A whole study of a tiny llama, whose heads are grouped and whose FFN is gated."""
    return STUDY(tiny("llama", seed=1), settings())
