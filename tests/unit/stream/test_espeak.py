import subprocess
from pathlib import Path

import numpy as np
import pytest

from layerleap.errors import BadMedia
from layerleap.stream import espeak as espeak_module
from layerleap.stream.espeak import LONGEST, PER_DOCUMENT, RATE, iter_spoken, resampled, speak
from media import write_wav

TEXTS = [
    f"The old man number {n} went home. Then the red bird sang a song. It was a long day by then. "
    "A small dog ran under the tree. And the moon came out again."
    for n in range(3)
]


@pytest.fixture
def espeak(monkeypatch):
    """A fake of the program: a tone as long as the sentence, at its own rate."""
    calls = []

    def run(command, *, input, **_):
        calls.append((command, input))
        path = Path(command[command.index("-w") + 1])
        write_wav(path, 0.5 * np.sin(np.arange(len(input) * 441) / 20), rate=22_050)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(espeak_module.subprocess, "run", run)
    monkeypatch.setattr("layerleap.stream.places.shutil.which", lambda name: f"/somewhere/{name}")
    return calls


def test_sentences_are_spoken_a_few_of_each_document(espeak):
    clips = list(iter_spoken(TEXTS))
    assert len(clips) == 3 * PER_DOCUMENT
    for clip, (command, sentence) in zip(clips, espeak, strict=True):
        assert command[0] == "/somewhere/espeak-ng"
        assert clip.transcript == sentence
        assert sentence in clip.document.text
        assert clip.rate == RATE
        assert len(clip.samples) == round(len(sentence) * 441 * RATE / 22_050)
    assert len({clip.name for clip in clips}) == len(clips)


def test_the_seed_decides_what_is_spoken(espeak):
    def transcripts(seed):
        return [clip.transcript for clip in iter_spoken(TEXTS, seed=seed)]

    assert transcripts(0) == transcripts(0) != transcripts(1)


def test_sentences_too_long_for_a_model_are_left_out(espeak):
    long = " ".join(["word"] * (LONGEST + 1)).capitalize() + "."
    clips = list(iter_spoken([f"{long} A short one is spoken."]))
    assert [clip.transcript for clip in clips] == ["A short one is spoken."]


def test_the_programs_error_message_is_passed_on(espeak, monkeypatch):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "starting\nno such voice\n")

    monkeypatch.setattr(espeak_module.subprocess, "run", fail)
    with pytest.raises(BadMedia, match=r"could not speak 'Hello there' \(no such voice\)"):
        speak("Hello there")


@pytest.mark.parametrize("new_rate", [16_000, 32_000])
def test_a_tone_keeps_pitch_and_loudness_at_another_rate(new_rate):
    seconds = np.arange(22_050) / 22_050
    tone = np.sin(2 * np.pi * 440 * seconds).astype(np.float32)
    sound = resampled(tone, 22_050, new_rate)
    expected = np.sin(2 * np.pi * 440 * np.arange(new_rate) / new_rate)
    assert np.abs(sound - expected).max() < 1e-5
    assert resampled(tone, 22_050, 22_050) is tone


def test_unwanted_documents_are_not_spoken_and_the_others_are_the_same(espeak):
    every = [(clip.name, clip.transcript) for clip in iter_spoken(TEXTS)]
    espeak.clear()
    some = list(iter_spoken(TEXTS, is_used=lambda document: "number 1" in document.text))
    assert len(espeak) == len(some) == PER_DOCUMENT
    names = {clip.document.name for clip in some}
    assert len(names) == 1
    expected = [one for one in every if one[0].startswith(f"{min(names)},")]
    assert [(clip.name, clip.transcript) for clip in some] == expected


@pytest.mark.parametrize("n", [1, 2, 441, 9_973, 30_011])
def test_a_sound_of_any_length_is_the_same_at_another_rate(n):
    seconds = np.arange(n) / 22_050
    swell = np.sin(2 * np.pi * 440 * seconds) * np.hanning(n)  # begins and ends in silence
    sound = resampled(swell.astype(np.float32), 22_050, 16_000)
    assert len(sound) == round(n * 16_000 / 22_050)
    if n > 441:
        again = np.interp(np.arange(len(sound)) / 16_000, seconds, swell)
        assert np.abs(sound - again).max() < 0.01
