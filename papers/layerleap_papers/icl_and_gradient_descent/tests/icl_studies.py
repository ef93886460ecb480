"""Small studies of in-context learning on tiny random models, made once."""

import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from layerleap.study.result import StudyResult
from layerleap_papers.icl_and_gradient_descent import STUDY, IclSettings
from tiny_models import WORDS, tiny

SMALL: dict[str, Any] = {
    "seeds": 2,
    "demonstrations": 4,
    "most": 6,
    "queries": 8,
    "search": 4,
    "rates": (0.01, 0.1),
    "lenses": ("logit",),
}


def task_file(folder: Path, name: str = "sizes.csv", n: int = 40) -> Path:
    """A task with two classes, in words of the tiny tokenizer."""
    rng = random.Random(0)
    texts = list(dict.fromkeys(" ".join(rng.sample(WORDS, 3)) for _ in range(2 * n)))[:n]
    lines = [f"{text},{rng.choice(('big', 'small'))}" for text in texts]
    path = folder / name
    path.write_text("\n".join(["text,label", *lines]), encoding="utf8")
    return path


def mapping_file(folder: Path) -> Path:
    """A task with many answers."""
    pairs = zip(WORDS, WORDS[::-1], strict=True)
    lines = [f'{{"text": "{a}", "label": "{b}"}}' for a, b in pairs]
    path = folder / "reverse.jsonl"
    path.write_text("\n".join(lines), encoding="utf8")
    return path


@cache
def folder() -> Path:
    """Where the files are."""
    return Path(mkdtemp(prefix="layerleap-test-"))


def settings(**changes: Any) -> IclSettings:
    """Everything small."""
    tasks = (str(task_file(folder())), str(mapping_file(folder())))
    return IclSettings(**{**SMALL, "tasks": tasks, **changes})


@cache
def made() -> StudyResult:
    """A whole study of a tiny llama, whose heads are grouped."""
    return STUDY(tiny("llama", seed=1), settings())
