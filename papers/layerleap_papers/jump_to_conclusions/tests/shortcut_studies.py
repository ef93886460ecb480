"""Small studies of shortcuts on tiny random models, made once."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from layerleap.study.result import StudyResult
from layerleap_papers.jump_to_conclusions import STUDY, ShortcutSettings
from tiny_models import sentences, tiny


@cache
def texts() -> tuple[str, str]:
    """Two files of documents, one a line."""
    folder = Path(mkdtemp(prefix="layerleap-test-"))
    for name, seed, count in (("one", 0, 400), ("two", 1, 300)):
        (folder / f"{name}.txt").write_text("\n".join(sentences(count, seed)))
    return str(folder / "one.txt"), str(folder / "two.txt")


def settings() -> ShortcutSettings:
    """Two texts, and few of them."""
    return ShortcutSettings(text=texts()[0], other=texts()[1], n_fit=600, n_read=200)


@cache
def made(name: str = "llama") -> StudyResult:
    """A whole study of a tiny model."""
    return STUDY(tiny(name), settings())
