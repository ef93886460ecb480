"""Recordings with transcripts, as batches for a teacher-forced decoder.

In: the bundled recording, .wav files with a .txt next to each, a folder of them, speech
synthesized by espeak-ng, or `Clip`s; and a speech-to-text model with its processor.
Out: `Batch`es: the decoder's input is the transcript, read where the next token is predicted.
"""

import wave
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerleap.errors import BadMedia, BadSettings
from layerleap.files import files_under
from layerleap.models.discovery.probe import sound_shape
from layerleap.models.transformer import Transformer
from layerleap.stream.documents import Document
from layerleap.stream.examples import Batch, Example, Sampling, TextCounts, collate
from layerleap.stream.places import check_sounds
from layerleap.stream.sampling import Positions, parse_positions
from layerleap.stream.split import Side, fingerprint, is_held_out, on_side
from layerleap.zoo.catalog import SOUND_NAMES
from layerleap.zoo.download import fetch

SAMPLE_BYTES = {1: "u1", 2: "<i2", 4: "<i4"}


@dataclass(frozen=True, eq=False)
class Clip:
    """One recording and its transcript."""

    name: str
    samples: np.ndarray[Any, Any]  # float32 (sample,), from -1 to 1
    rate: int  # samples per second
    transcript: str
    document: Document | None = None  # the text it was spoken from; None for a real recording

    @property
    def split_document(self) -> Document:
        """The document that decides the clip's side: clips of one document stay together."""
        return self.document or Document(self.name, self.transcript)


def iter_clips(
    source: Any, *, seed: int = 0, is_used: Callable[[Document], bool] | None = None
) -> Iterator[Clip]:
    """The recordings of `source`.

    Args:
        source: "beckett" (bundled); a .wav file with its transcript next to it, as .txt; a folder
            of them; "spoken" for sentences of the bundled news spoken by espeak-ng, or
            "spoken:TEXT" for another text; or `Clip`s.
        seed: seed of the choice of spoken sentences.
        is_used: says which documents to use; None for all.
    """
    label = str(source)
    if isinstance(source, str) and (label == "spoken" or label.startswith("spoken:")):
        from layerleap.stream.espeak import iter_spoken

        return iter_spoken(label.partition(":")[2] or "news", seed=seed, is_used=is_used)
    clips = _iter_recorded(source)
    return clips if is_used is None else (c for c in clips if is_used(c.split_document))


def _iter_recorded(source: Any) -> Iterator[Clip]:
    if not isinstance(source, str | Path):
        return _checked(source)
    label = str(source)
    if label in SOUND_NAMES:
        return iter([_from_file(fetch(label))])
    check_sounds(label)
    path = Path(label).expanduser()
    if path.is_dir():
        files = files_under(path, lambda file: file.suffix.lower() == ".wav")
        if not files:
            raise BadMedia(f"the folder {path} contains no .wav file; expected recordings")
        return (_from_file(file) for file in files)
    return iter([_from_file(path)])


def sound_batches(
    transformer: Transformer,
    source: Any,
    sampling: Sampling | None = None,
    *,
    side: Side = "both",
    n_texts: int | None = None,
    per_batch: int = 4,
    text_counts: TextCounts | None = None,
    ridge_share: float = 0.0,
) -> Iterator[Batch]:
    """Batches of recordings whose decoder input is the transcript.

    Only positions that predict a token of the transcript, or its end, can be read. The tokens for
    language and task come before and are always given. The arguments are those of `batches_of`.
    Of `sampling`, only `positions`, `held_out` and `seed` are used; None reads all positions.
    """
    sampling = sampling or Sampling(positions="all")
    text_counts = text_counts if text_counts is not None else TextCounts()
    _require_sound(transformer)
    policy = parse_positions(sampling.positions, sampling.seed)

    def is_on_side(document: Document) -> bool:
        held_out = is_held_out(document, share=sampling.held_out, seed=sampling.seed)
        return on_side(side, held_out) and fingerprint(document.text) not in text_counts.leave_out

    clips = islice(iter_clips(source, seed=sampling.seed, is_used=is_on_side), n_texts)
    index, documents = 0, dict[str, int]()
    while chunk := list(islice(clips, per_batch)):
        examples = []
        for clip in chunk:
            document = documents.setdefault(clip.split_document.name, len(documents))
            is_ridge = is_held_out(clip.split_document, share=ridge_share, seed=sampling.seed + 1)
            examples.append(_example(transformer, clip, document, policy, is_ridge))
            text_counts.admits(document, clip.split_document.text)
            text_counts.use(document)
            text_counts.documents = len(documents)
            text_counts.note_example(examples[-1])
        features = torch.cat([_features(transformer, clip) for clip in chunk])
        texts = collate(transformer, examples, index)
        decoder = {f"decoder_{name}": value for name, value in texts.inputs.items()}
        yield replace(texts, inputs={"input_features": features, **decoder})
        index += 1


def _require_sound(transformer: Transformer) -> None:
    name = transformer.identity.name
    if transformer.model.main_input_name != "input_features" or transformer.kind != "next-token":
        raise BadSettings(f"{name} cannot read recordings; expected a speech-to-text model")
    processor = transformer.processor
    if getattr(processor, "feature_extractor", None) is None or transformer.tokenizer is None:
        raise BadMedia(
            f"{name} has no processor with a tokenizer; save one next to the model, or pass "
            "processor=... and tokenizer=..."
        )


def _features(transformer: Transformer, clip: Clip) -> Tensor:
    """The encoder's input for a clip: (1, band, frame)."""
    extractor: Any = transformer.processor.feature_extractor
    if clip.rate != extractor.sampling_rate:
        raise BadMedia(
            f"{clip.name} has {clip.rate} samples per second, but the model expects "
            f"{extractor.sampling_rate}; resample it, for example with: ffmpeg -i IN.wav -ar "
            f"{extractor.sampling_rate} -ac 1 OUT.wav"
        )
    longest = getattr(extractor, "n_samples", None)
    if longest and len(clip.samples) > longest:
        raise BadMedia(
            f"{clip.name} lasts {len(clip.samples) / clip.rate:.1f} s, but the model hears at "
            f"most {longest / clip.rate:.0f} s; split it and its transcript into pieces"
        )
    encoded = extractor(clip.samples, sampling_rate=clip.rate, return_tensors="pt")
    features = torch.as_tensor(encoded["input_features"])
    bands, frames = sound_shape(transformer.model.config)
    if tuple(features.shape[1:]) != (bands, frames):
        raise BadMedia(
            f"the processor gives {features.shape[1]} bands of {features.shape[2]} frames, but the "
            f"model expects {bands} of {frames}; load the model's own processor"
        )
    return features


def _example(
    transformer: Transformer, clip: Clip, document: int, policy: Positions, ridge_rows: bool
) -> Example:
    """The transcript as decoder input, and the token that follows each kept position."""
    tokenizer: Any = transformer.tokenizer
    config = transformer.model.config
    # Decoders write a space before the first word too.
    words = tokenizer(f" {clip.transcript.strip()}", add_special_tokens=False)["input_ids"]
    prefix = _prefix(tokenizer(f" {clip.transcript.strip()}")["input_ids"], words)
    if prefix[:1] != [config.decoder_start_token_id]:
        prefix = [config.decoder_start_token_id, *prefix]
    ids = [*prefix, *words, config.eos_token_id]
    if len(ids) - 1 > config.max_target_positions:
        raise BadMedia(
            f"the transcript of {clip.name} has {len(ids) - 1} tokens, but the model writes at "
            f"most {config.max_target_positions}; split it and the recording into pieces"
        )
    keep = policy.choose(range(len(prefix) - 1, len(ids) - 1), clip.transcript)
    gold = tuple(ids[position + 1] for position in keep)
    return Example(document, tuple(ids[:-1]), tuple(keep), ridge_rows, gold)


def _prefix(ids: list[int], words: list[int]) -> list[int]:
    """The tokens that the tokenizer puts before the words: start, language, task."""
    for start in range(len(ids) - len(words) + 1):
        if ids[start : start + len(words)] == words:
            return ids[:start]
    return []


def _checked(clips: Iterable[Any]) -> Iterator[Clip]:
    for clip in clips:
        if not isinstance(clip, Clip):
            raise BadMedia(f"an item has type {type(clip).__name__}; expected a Clip")
        if clip.samples.ndim != 1 or clip.samples.dtype.kind != "f" or not len(clip.samples):
            raise BadMedia(
                f"{clip.name}: samples are {clip.samples.dtype} of shape {clip.samples.shape}; "
                "expected floating-point numbers of shape (sample,), one channel"
            )
        if not clip.transcript.strip():
            raise BadMedia(f"{clip.name} has no transcript; teacher forcing needs one")
        yield clip


def _from_file(path: Path) -> Clip:
    text_file = path.with_suffix(".txt")
    try:
        transcript = " ".join(text_file.read_text(encoding="utf8").split())
    except FileNotFoundError as error:
        raise BadMedia(
            f"{path.name} has no transcript; expected {text_file.name} next to it"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadMedia(f"{text_file} cannot be read ({error}); expected UTF-8 text") from error
    if not transcript:
        raise BadMedia(f"{text_file} is empty; expected the transcript of {path.name}")
    return Clip(path.name, *read_wav(path), transcript)


def read_wav(path: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Samples from -1 to 1, and their rate per second."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        reason = str(error) or "it ends too early"
        raise BadMedia(
            f"{path} is not a readable uncompressed .wav file ({reason}); check the file"
        ) from error
    if channels != 1:
        raise BadMedia(f"{path} has {channels} channels; expected one, so mix them first")
    if width not in SAMPLE_BYTES:
        raise BadMedia(f"{path} has {8 * width} bits per sample; expected 8, 16 or 32")
    samples = np.frombuffer(data, SAMPLE_BYTES[width]).astype(np.float32)
    if not len(samples):
        raise BadMedia(f"{path} is empty; expected a recording")
    return samples / 2 ** (8 * width - 1) - (width == 1), rate  # 8-bit samples are unsigned
