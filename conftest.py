"""Fixtures shared by all tests; tiny random models come from `families`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# A hub is never asked: what tests need is bundled, tiny and random, or made on the spot.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def smollm2() -> object:
    """The bundled decoder, loaded once."""
    import layerleap

    return layerleap.load("smollm2")


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the library logs during a test."""
    from logged import logged

    with logged() as lines:
        yield lines


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with nothing in it."""
    monkeypatch.setenv("LAYERLEAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
