"""Speech synthesized from text by the program espeak-ng, if it is installed.

In: any text. Out: one clip per sentence, with the sentence as its transcript.

The voice is synthetic: results describe how a model hears such a voice, and reports say so.
"""

import math
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from layerleap.errors import BadMedia, CannotFetch
from layerleap.stream.documents import Document, iter_documents
from layerleap.stream.sounds import Clip, read_wav
from layerleap.stream.split import iter_texts

PROGRAM = "espeak-ng"
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
    text: Any = "news", *, seed: int = 0, wanted: Callable[[Document], bool] | None = None
) -> Iterator[Clip]:
    """Clips of spoken sentences: a few from each document, documents in random order.

    Args:
        text: anything `iter_documents` accepts.
        seed: seed of both orders.
        wanted: says which documents to speak; None for all.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise CannotFetch(
            f"{PROGRAM} is not installed, so text cannot be spoken; install it (on Debian: "
            f"apt-get install {PROGRAM}) or use recordings"
        )
    documents = list(iter_documents(text))
    random.Random(seed).shuffle(documents)
    return (
        Clip(f"{document.name}, sentence {number}", *speak(sentence, program), sentence, document)
        for document in documents
        if wanted is None or wanted(document)
        for number, sentence in enumerate(
            iter_texts(document, "sentence", per_document=PER_DOCUMENT, seed=seed), start=1
        )
        if len(sentence.split()) <= LONGEST
    )


def speak(sentence: str, program: str = PROGRAM) -> tuple[np.ndarray[Any, Any], int]:
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
            raise BadMedia(f"{PROGRAM} could not speak {sentence[:40]!r} ({reason})")
        samples, rate = read_wav(file)
    return resampled(samples, rate, RATE), RATE


def resampled(samples: np.ndarray[Any, Any], rate: int, new_rate: int) -> np.ndarray[Any, Any]:
    """The same sound at `new_rate`: its spectrum, truncated or padded with zeros.

    The sound is padded with silence until its length is a product of small primes: with a large
    prime factor, the Fourier transform takes ten times as long.
    """
    if rate == new_rate:
        return samples
    common = math.gcd(rate, new_rate)
    periods = _smooth(-(-len(samples) // (rate // common)))
    old_length, new_length = periods * (rate // common), periods * (new_rate // common)
    spectrum = np.fft.rfft(samples.astype(np.float64), old_length)
    new_spectrum = np.zeros(new_length // 2 + 1, dtype=complex)
    both = min(len(spectrum), len(new_spectrum))
    new_spectrum[:both] = spectrum[:both]
    sound = np.fft.irfft(new_spectrum, new_length)[: round(len(samples) * new_rate / rate)]
    return (sound * (new_length / old_length)).astype(np.float32)


def _smooth(least: int) -> int:
    """The smallest number >= `least` whose only prime factors are 2, 3 and 5."""
    best = 2 ** max(0, least - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            twos = 2 ** max(0, -(-least // three) - 1).bit_length()
            best = min(best, three * twos)
            three *= 3
        five *= 5
    return best
