"""Speech synthesized from text by the program espeak-ng, if it is installed.

In: any text. Out: one clip per sentence, with the sentence as its transcript.

The voice is synthetic: results describe how a model hears such a voice, and reports say so.
"""

import math
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from layerleap.errors import BadMedia, CannotFetch
from layerleap.extras import library
from layerleap.stream.documents import Document, iter_documents
from layerleap.stream.places import SPEAKER, speaker
from layerleap.stream.sounds import Clip, read_wav
from layerleap.stream.split import iter_texts

VOICE = "en-us"
RATE = 16_000  # samples per second that speech models expect
WORDS_PER_MINUTE = 150
LONGEST = 40  # words: about 16 of the 30 seconds that a model hears
PER_DOCUMENT = 4
NOTE = (
    "The speech was synthesized from text by espeak-ng: its voice is clearer and more uniform than "
    "a human's."
)


def iter_spoken(
    text: Any = "news", *, seed: int = 0, is_used: Callable[[Document], bool] | None = None
) -> Iterator[Clip]:
    """Clips of spoken sentences: a few from each document of `text`, documents in random order."""
    program = speaker()
    documents = list(iter_documents(text))
    random.Random(seed).shuffle(documents)
    return (
        Clip(f"{document.name}, sentence {number}", *speak(sentence, program), sentence, document)
        for document in documents
        if is_used is None or is_used(document)
        for number, sentence in enumerate(
            iter_texts(document, "sentence", per_document=PER_DOCUMENT, seed=seed), start=1
        )
        if len(sentence.split()) <= LONGEST
    )


def speak(sentence: str, program: str = SPEAKER) -> tuple[np.ndarray[Any, Any], int]:
    """The samples of the spoken sentence, and their rate per second."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speech.wav"
        command = [program, "-v", VOICE, "-s", str(WORDS_PER_MINUTE), "-w", str(file), "--stdin"]
        try:
            done = subprocess.run(command, input=sentence, capture_output=True, text=True)
        except OSError as error:
            raise CannotFetch(
                f"{program} could not be started ({error}); check its installation"
            ) from error
        if done.returncode or not file.is_file():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise BadMedia(f"{SPEAKER} could not speak {sentence[:40]!r} ({reason})")
        samples, rate = read_wav(file)
    return resampled(samples, rate, RATE), RATE


def resampled(samples: np.ndarray[Any, Any], rate: int, new_rate: int) -> np.ndarray[Any, Any]:
    """The same sound at `new_rate`."""
    if rate == new_rate:
        return samples
    signal = library("scipy.signal", "bundled", "speaking text needs it")
    # Padded with silence to a length that is a whole number at both rates.
    padded = np.pad(samples, (0, -len(samples) % (rate // math.gcd(rate, new_rate))))
    sound = signal.resample(padded.astype(np.float64), len(padded) * new_rate // rate)
    return sound[: round(len(samples) * new_rate / rate)].astype(np.float32)
