"""Tiny random image and speech models with processors, and small images and clips for them."""

import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import ViTImageProcessorPil, WhisperFeatureExtractor

from families import build
from layerleap.models.transformer import Transformer
from layerleap.stream.sounds import Clip
from tiny_models import WORDS, tokenizer

RATE = 16_000


def image_processor(size: int = 16) -> Any:
    return ViTImageProcessorPil(size={"height": size, "width": size})


def seeing(name: str = "vit", *, seed: int = 0, **changes: Any) -> Transformer:
    """A tiny image classifier of 7 classes, called 0 to 6."""
    labels = {"id2label": {n: str(n) for n in range(7)}, "label2id": {str(n): n for n in range(7)}}
    model = build(name, seed, **{**labels, **changes})
    return Transformer.wrap(model, processor=image_processor(), name=f"tiny-{name}")


def hearing(*, seed: int = 0, **changes: Any) -> Transformer:
    """A tiny speech model for one second of sound that writes `WORDS`."""
    model = build("whisper", seed, **{"max_source_positions": 50, **changes})
    words = tokenizer("masked-token")
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    processor = SimpleNamespace(feature_extractor=extractor, tokenizer=words)
    return Transformer.wrap(model, words, processor=processor, name="tiny-whisper")


def images(n: int, seed: int = 0, side: int = 12) -> np.ndarray[Any, Any]:
    """Grey images of noise."""
    return np.random.default_rng(seed).integers(0, 256, (n, side, side), dtype=np.uint8)


def sets(folder: Path, n: int = 30, classes: int = 7, **more: Any) -> Path:
    """A .npz file of images, sorted by class as data sets often are."""
    labels = np.sort(np.arange(n) % classes)
    path = folder / "set.npz"
    np.savez(path, images=images(n, **more), labels=labels)
    return path


def clip(words: int = 4, seed: int = 0, seconds: float = 0.5) -> Clip:
    """Noise with a few random words as its transcript."""
    rng = np.random.default_rng(seed)
    transcript = " ".join(rng.choice(WORDS, words))
    samples = rng.normal(0, 0.1, int(seconds * RATE)).astype(np.float32)
    return Clip(f"clip {seed}", samples, RATE, transcript)


def write_wav(
    path: Path, samples: np.ndarray[Any, Any], *, rate: int = RATE, channels: int = 1
) -> Path:
    """16-bit samples."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path
