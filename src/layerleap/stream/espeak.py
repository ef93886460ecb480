"""Speech made from text by espeak-ng, where that program is installed.

In: any text. Out: one clip a sentence, with the sentence as its transcript.

The voice is a machine's: results on it say how a model hears such a voice, and reports say so.
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
RATE = 16_000  # samples a second that speech models hear
WORDS_A_MINUTE = 150
LONGEST = 40  # words: some sixteen seconds of the thirty that a model hears
PER_DOCUMENT = 4
NOTE = (
    "The speech was made by espeak-ng from text: a machine's voice, clearer and plainer than a "
    "human's."
)


def iter_spoken(
    text: Any = "news", *, seed: int = 0, wanted: Callable[[Document], bool] | None = None
) -> Iterator[Clip]:
    """Sentences of a text, read aloud; a few of each document, documents in random order.

    Args:
        text: anything `iter_documents` reads.
        seed: of both orders.
        wanted: which documents are spoken; all when None.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise CannotFetch(
            f"{PROGRAM} is not installed, so no text can be spoken; install it, on Debian with "
            f"apt-get install {PROGRAM}, or give recordings"
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
    """The sentence as samples, and how many there are a second."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "speech.wav"
        command = [program, "-v", VOICE, "-s", str(WORDS_A_MINUTE), "-w", str(file), "--stdin"]
        try:
            done = subprocess.run(command, input=sentence, capture_output=True, text=True)
        except OSError as error:
            raise CannotFetch(f"{program} could not be started ({error}); check it") from error
        if done.returncode or not file.is_file():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise BadMedia(f"{PROGRAM} could not speak {sentence[:40]!r} ({reason})")
        samples, rate = read_wav(file)
    return resampled(samples, rate, RATE), RATE


def resampled(samples: np.ndarray[Any, Any], rate: int, wanted: int) -> np.ndarray[Any, Any]:
    """The same sound with `wanted` samples a second: its spectrum, cut or filled with zeros.

    Silence is put after it until the number of samples is a product of small primes: with a large
    one in it, a Fourier transform takes ten times as long.
    """
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    pieces = _smooth(-(-len(samples) // (rate // common)))
    before, after = pieces * (rate // common), pieces * (wanted // common)
    spectrum = np.fft.rfft(samples.astype(np.float64), before)
    kept = np.zeros(after // 2 + 1, dtype=complex)
    both = min(len(spectrum), len(kept))
    kept[:both] = spectrum[:both]
    length = round(len(samples) * wanted / rate)
    return (np.fft.irfft(kept, after)[:length] * (after / before)).astype(np.float32)


def _smooth(least: int) -> int:
    """The smallest number from `least` on whose only prime factors are 2, 3 and 5."""
    found = 2 ** max(0, least - 1).bit_length()
    five = 1
    while five < found:
        three = five
        while three < found:
            twos = 2 ** max(0, -(-least // three) - 1).bit_length()
            found = min(found, three * twos)
            three *= 3
        five *= 5
    return found
