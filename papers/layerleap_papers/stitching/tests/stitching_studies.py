"""Small studies of stitching on tiny random models, made once."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from families import build
from layerleap.models.transformer import Transformer
from layerleap.study.result import StudyResult
from layerleap_papers.stitching import STUDY
from rotated import plain_llama, rotated, rotation
from tiny_models import WORDS, sentences, tokenizer

SMALL = {"n_fit": 40, "n_read": 30, "layers": 3, "n_reviews": 24, "kept_blocks": 1}


@cache
def files() -> dict[str, str]:
    """A text and labelled reviews, by the names of their settings."""
    folder, rng = Path(mkdtemp(prefix="layerleap-test-")), random.Random(0)
    reviews = [
        {"text": " ".join(rng.choices(WORDS, k=rng.randint(4, 9))), "label": number % 2}
        for number in range(160)
    ]
    texts = {"text": [{"text": text} for text in sentences(80)], "reviews": reviews}
    for name, rows in texts.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf8")
    return {name: str(folder / f"{name}.jsonl") for name in texts}


@cache
def models() -> tuple[Transformer, Transformer, Transformer]:
    """A model, the same one rotated, and a narrower classifier."""
    model = plain_llama()
    a = Transformer.wrap(model, tokenizer(), name="a")
    b = Transformer.wrap(rotated(model, rotation(24)), tokenizer(), name="b")
    c = build("llama_text", 1, hidden_size=16, num_labels=2).double()
    return a, b, Transformer.wrap(c, tokenizer(), name="c")


@cache
def made() -> StudyResult:
    """A whole study of these models."""
    a, b, c = models()
    return STUDY(a, other=b, classifier=c, **files(), **SMALL)
