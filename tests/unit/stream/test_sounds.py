import wave
from dataclasses import replace

import numpy as np
import pytest
import torch

from layerleap.errors import BadMedia, BadSettings, CannotFetch
from layerleap.lens.lens import Lens
from layerleap.lens.scores import score
from layerleap.stats.collect import collect
from layerleap.stream.batches import batches_of, modality
from layerleap.stream.documents import Document
from layerleap.stream.examples import Sampling, TextCounts
from layerleap.stream.sounds import iter_clips, read_wav, sound_batches
from layerleap.zoo.catalog import CATALOG
from media import RATE, clip, hearing, seeing, write_wav
from tiny_models import WORDS, tiny


@pytest.fixture(scope="module")
def whisper():
    return hearing()


def recorded(folder, name="a", transcript="the cat sat", **more):
    path = write_wav(folder / f"{name}.wav", clip(seed=len(name)).samples, **more)
    (folder / f"{name}.txt").write_text(transcript + "\n")
    return path


def test_a_recording_is_read_with_the_transcript_next_to_it(tmp_path):
    path = recorded(tmp_path, transcript="the cat\n  sat")
    (recording,) = iter_clips(path)
    assert (recording.name, recording.rate, recording.transcript) == ("a.wav", RATE, "the cat sat")
    assert np.abs(recording.samples - clip(seed=1).samples).max() < 1e-4


def test_a_folder_gives_its_recordings_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    recorded(tmp_path, "b")
    recorded(tmp_path / "deep", "c")
    recorded(tmp_path, "a")
    assert [recording.name for recording in iter_clips(str(tmp_path))] == [
        "a.wav",
        "b.wav",
        "c.wav",
    ]


def test_the_bundled_recording_comes_from_the_cache(empty_cache):
    folder = CATALOG["beckett"].path.parent
    folder.mkdir(parents=True)
    recorded(folder, "beckett", "ever tried")
    (recording,) = iter_clips("beckett")
    assert recording.transcript == "ever tried"


@pytest.mark.parametrize(("width", "middle"), [(1, 128), (2, 0), (4, 0)])
def test_samples_run_from_minus_one_to_one(tmp_path, width, middle):
    most = 2 ** (8 * width - 1)
    values = np.array([middle, middle + most - 1, middle - most]).astype(
        {1: "u1", 2: "<i2", 4: "<i4"}[width]
    )
    with wave.open(str(tmp_path / "x.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(values.tobytes())
    samples, rate = read_wav(tmp_path / "x.wav")
    assert rate == RATE
    assert samples.dtype == np.float32
    assert samples == pytest.approx([0, 1, -1], abs=1.01 / most)


def test_the_decoder_is_given_the_transcript_and_read_where_words_are_predicted(whisper):
    transcript = "the cat sat"
    (batch,) = sound_batches(whisper, [replace(clip(), transcript=transcript)])
    start, bos, end = 2, 1, 2
    words = [whisper.tokenizer.convert_tokens_to_ids(word) for word in transcript.split()]
    assert batch.inputs["decoder_input_ids"].tolist() == [[start, bos, *words]]
    assert batch.positions.tolist() == [1, 2, 3, 4]
    assert batch.gold.tolist() == [*words, end]
    assert batch.inputs["input_features"].shape == (1, 8, 100)
    assert (batch.n_texts, batch.n_tokens) == (1, 5)


def test_rows_do_not_depend_on_their_batch_or_its_padding(whisper):
    clips = [clip(words, seed=words) for words in (2, 9, 4, 6, 3)]

    def states(per_batch):
        states = [
            whisper.capture(batch.inputs, keep=batch.keep).states[3]
            for batch in sound_batches(whisper, clips, per_batch=per_batch)
        ]
        return torch.cat(states)

    assert len(states(1)) == sum(len(each.transcript.split()) + 1 for each in clips)
    torch.testing.assert_close(states(1), states(5), rtol=1e-4, atol=1e-4)


def test_some_clips_of_a_batch_are_a_batch(whisper):
    (batch,) = sound_batches(whisper, [clip(words, seed=words) for words in (2, 9, 4)])
    some = batch.texts(torch.tensor([True, False, True]))
    assert some.inputs["decoder_input_ids"].shape == (2, 6)
    assert some.inputs["input_features"].shape == (2, 8, 100)
    chosen = batch.documents != 1
    assert torch.equal(some.gold, batch.gold[chosen])
    whole = whisper.capture(batch.inputs, keep=batch.keep).states[1][chosen]
    torch.testing.assert_close(
        whisper.capture(some.inputs, keep=some.keep).states[1], whole, rtol=1e-4, atol=1e-4
    )


def test_positions_may_be_fewer_than_all(whisper):
    clips = [clip(8, seed=n) for n in range(6)]
    one = [b.positions for b in sound_batches(whisper, clips, Sampling(positions="one"))]
    assert len(torch.cat(one)) == 6
    (nth, _) = sound_batches(whisper, clips, Sampling(positions="every:4"))
    assert nth.positions[nth.documents == 0].tolist() == [1, 5, 9]


def test_clips_of_one_document_stay_on_one_side(whisper):
    clips = [
        replace(clip(seed=n), document=Document(f"article {n // 3}", f"text {n // 3}"))
        for n in range(60)
    ]

    def names(side):
        batches = sound_batches(whisper, clips, side=side)
        rows = sum(len(batch.documents.unique()) for batch in batches)
        names_on_side = [
            each.name
            for each in clips
            if side == "both" or _is_held_out(each) == (side == "held-out")
        ]
        return rows, names_on_side

    assert names("fit")[0] + names("held-out")[0] >= 20
    fit, held_out = names("fit")[1], names("held-out")[1]
    articles = [{int(name.split()[1]) // 3 for name in side} for side in (fit, held_out)]
    assert not articles[0] & articles[1]
    text_counts = TextCounts()
    list(sound_batches(whisper, clips, text_counts=text_counts))
    assert (text_counts.documents, text_counts.texts) == (20, 60)


def _is_held_out(each):
    from layerleap.stream.split import is_held_out

    return is_held_out(each.split_document, share=0.25, seed=0)


def test_speech_is_scored_and_fitted_like_text(whisper):
    clips = [clip(10, seed=n) for n in range(12)]
    stats = collect(whisper, clips, Sampling(positions="all", held_out=0.0))
    assert stats.fit.n == 12 * 11
    batches = batches_of(whisper, clips, Sampling(positions="all"), side="both")
    scores = score(whisper, {"logit": Lens(whisper)}, batches)
    assert scores.check.agreement == 1.0
    assert len(scores.documents) == 12 * 11
    assert modality(whisper) == "sound"


def test_a_missing_transcript_is_reported(tmp_path, whisper):
    write_wav(tmp_path / "a.wav", clip().samples)
    with pytest.raises(BadMedia, match=r"a\.wav has no transcript; expected a\.txt next to it"):
        list(sound_batches(whisper, tmp_path))
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(BadMedia, match=r"a\.txt is empty; expected the transcript of a\.wav"):
        list(sound_batches(whisper, tmp_path))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(BadMedia, match="expected UTF-8 text"):
        list(sound_batches(whisper, tmp_path))


def test_another_rate_is_refused_with_the_command_to_resample_it(tmp_path, whisper):
    recorded(tmp_path, rate=22_050)
    with pytest.raises(
        BadMedia, match=r"22050 samples per second, but the model expects 16000.*ffmpeg"
    ):
        list(sound_batches(whisper, tmp_path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda f: f / "nothing.wav",
            "there is no file or folder .*; recordings by name are beckett",
        ),
        (lambda f: f, "contains no .wav file"),
        (lambda f: recorded(f, channels=2), "has 2 channels; expected one"),
        (lambda f: _broken(recorded(f)), "not a readable uncompressed .wav file"),
        (lambda f: _empty(recorded(f)), "is empty; expected a recording"),
        (lambda f: _three_bytes(recorded(f)), "has 24 bits per sample"),
    ],
)
def test_unreadable_recordings_are_reported_in_one_line(tmp_path, whisper, make, message):
    with pytest.raises(BadMedia, match=message) as caught:
        list(sound_batches(whisper, make(tmp_path)))
    assert "\n" not in str(caught.value)


def _broken(path):
    path.write_bytes(b"no sound at all, but long enough to be some")
    return path


def _empty(path):
    return write_wav(path, np.zeros(0))


def _three_bytes(path):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(3)
        file.setframerate(RATE)
        file.writeframes(b"\0" * 300)
    return path


def test_what_is_too_long_is_refused_and_not_cut(whisper):
    with pytest.raises(BadMedia, match=r"lasts 1\.5 s, but the model hears at most 1 s"):
        list(sound_batches(whisper, [clip(seconds=1.5)]))
    with pytest.raises(BadMedia, match="has 72 tokens, but the model writes at most 64"):
        list(sound_batches(whisper, [clip(70)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": np.zeros((2, 100), np.float32)}, r"float32 of shape \(2, 100\)"),
        ({"samples": np.zeros(100, np.int16)}, "int16 of shape"),
        ({"samples": np.zeros(0, np.float32)}, r"of shape \(0,\)"),
        ({"transcript": "  "}, "has no transcript"),
    ],
)
def test_a_clip_of_the_wrong_shape_is_refused(whisper, change, message):
    with pytest.raises(BadMedia, match=message):
        list(sound_batches(whisper, [replace(clip(), **change)]))


def test_anything_but_a_clip_is_refused(whisper):
    with pytest.raises(BadMedia, match="an item has type ndarray; expected a Clip"):
        list(sound_batches(whisper, [np.zeros(100)]))


def test_models_that_do_not_read_speech_are_refused(whisper):
    for model in (tiny("llama"), seeing()):
        with pytest.raises(BadSettings, match="expected a speech-to-text model"):
            list(sound_batches(model, [clip()]))
    deaf = hearing()
    deaf.processor = None
    with pytest.raises(BadMedia, match="tiny-whisper has no processor with a tokenizer"):
        list(sound_batches(deaf, [clip()]))


def test_a_processor_of_another_model_is_refused():
    other = hearing(num_mel_bins=10)
    with pytest.raises(
        BadMedia, match="gives 8 bands of 100 frames, but the model expects 10 of 100"
    ):
        list(sound_batches(other, [clip()]))


def test_without_espeak_nothing_is_spoken(whisper, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(CannotFetch, match=r"espeak-ng is not installed.*apt-get install espeak-ng"):
        list(sound_batches(whisper, "spoken"))


def test_the_words_of_the_tests_are_known(whisper):
    assert len(WORDS) > 30
    assert whisper.tokenizer.unk_token_id not in whisper.tokenizer(" ".join(WORDS))["input_ids"]


def test_a_mistyped_side_of_clips_is_refused(whisper):
    with pytest.raises(BadSettings, match=r"side is 'Fit'; .* did you mean 'fit'"):
        next(batches_of(whisper, [clip()], Sampling(), side="Fit"))
