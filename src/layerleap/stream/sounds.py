"""Speech: recordings with their transcripts, to batches of teacher-forced decoders.

In: the bundled recording, .wav files with a .txt beside each, a folder of such, speech made by
espeak-ng, or clips themselves; and a speech-to-text model with its processor.
Out: `Batch`es: the decoder is given the transcript, and read where the next word is to come.
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
from layerleap.models.discovery.probe import ready, sound_shape
from layerleap.models.transformer import Transformer
from layerleap.stream.documents import Document
from layerleap.stream.examples import Batch, Census, Example, Sampling, collate
from layerleap.stream.positions import Positions, parse_positions
from layerleap.stream.split import Side, is_held_out
from layerleap.zoo.catalog import SOUND_NAMES
from layerleap.zoo.download import fetch

SAMPLE_BYTES = {1: "u1", 2: "<i2", 4: "<i4"}


@dataclass(frozen=True, eq=False)
class Clip:
    """One recording and what is said in it."""

    name: str
    samples: np.ndarray[Any, Any]  # float32 (sample,), from -1 to 1
    rate: int  # samples a second
    transcript: str
    document: Document | None = None  # what it is kept apart by; its own transcript when None

    @property
    def kept_apart_by(self) -> Document:
        """Clips of one document stay on one side."""
        return self.document or Document(self.name, self.transcript)


def iter_clips(
    source: Any, *, seed: int = 0, wanted: Callable[[Document], bool] | None = None
) -> Iterator[Clip]:
    """The recordings of `source`.

    Args:
        source: "beckett" (bundled); a .wav file with its transcript beside it, as .txt; a folder
            of such; "spoken", sentences of the bundled news read by espeak-ng, or "spoken:TEXT"
            for another text; or clips.
        seed: chooses the sentences that are spoken.
        wanted: of which documents clips are wanted; of all when None. Others are not spoken.
    """
    label = str(source)
    if isinstance(source, str) and (label == "spoken" or label.startswith("spoken:")):
        from layerleap.stream.espeak import iter_spoken

        return iter_spoken(label.partition(":")[2] or "news", seed=seed, wanted=wanted)
    clips = _iter_recorded(source)
    return clips if wanted is None else (c for c in clips if wanted(c.kept_apart_by))


def _iter_recorded(source: Any) -> Iterator[Clip]:
    if not isinstance(source, str | Path):
        return _checked(source)
    label = str(source)
    if label in SOUND_NAMES:
        return iter([_from_file(fetch(label))])
    path = Path(label).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() == ".wav")
        if not files:
            raise BadMedia(f"the folder {path} holds no .wav file; recordings are wanted")
        return (_from_file(file) for file in files)
    if not path.is_file():
        names = ", ".join((*SOUND_NAMES, "spoken"))
        raise BadMedia(f"there is no file or folder {label}; bundled sounds are {names}")
    return iter([_from_file(path)])


def sound_batches(
    transformer: Transformer,
    source: Any,
    sampling: Sampling | None = None,
    *,
    side: Side = "both",
    n_clips: int | None = None,
    per_batch: int = 4,
    census: Census | None = None,
    ridge_share: float = 0.0,
) -> Iterator[Batch]:
    """Batches of recordings, the decoder's input being the transcript itself.

    Positions that may be read are those after which a token of the transcript, or its end, is to
    come; the tokens that say which language and task come before, and are given anyway.

    Args:
        transformer: a speech-to-text model; its processor prepares sound and transcript.
        source: anything `iter_clips` reads.
        sampling: of it `positions`, `held_out` and `seed` count; all positions when None.
        side: clips to fit on, clips held out, or both.
        n_clips: stop after that many.
        per_batch: clips in one forward pass.
        census: filled in as clips go by.
        ridge_share: share of the clips to fit on that are held back to choose a ridge.
    """
    sampling = sampling or Sampling(positions="all")
    census = census if census is not None else Census()
    _require_sound(transformer)
    policy = parse_positions(sampling.positions, sampling.seed)

    def wanted(document: Document) -> bool:
        is_out = is_held_out(document, share=sampling.held_out, seed=sampling.seed)
        return side == "both" or is_out == (side == "held-out")

    clips = iter_clips(source, seed=sampling.seed, wanted=wanted)
    some, index, documents = islice(clips, n_clips), 0, dict[str, int]()
    while chunk := list(islice(some, per_batch)):
        examples = []
        for clip in chunk:
            document = documents.setdefault(clip.kept_apart_by.name, len(documents))
            back = is_held_out(clip.kept_apart_by, share=ridge_share, seed=sampling.seed + 1)
            examples.append(_example(transformer, clip, document, policy, back))
            census.documents = len(documents)
            census.note(examples[-1])
        features = [_features(transformer, clip) for clip in chunk]
        yield _batch(transformer, torch.cat(features), examples, index)
        index += 1


def _require_sound(transformer: Transformer) -> None:
    name = transformer.identity.name
    if transformer.model.main_input_name != "input_features" or transformer.kind != "next-token":
        raise BadSettings(f"{name} is no speech-to-text model, so it cannot hear recordings")
    processor = transformer.processor
    if getattr(processor, "feature_extractor", None) is None or transformer.tokenizer is None:
        raise BadMedia(
            f"{name} has no processor with a tokenizer; save one beside the model, or pass "
            "processor=... and tokenizer=..."
        )


def _features(transformer: Transformer, clip: Clip) -> Tensor:
    """What the encoder takes of a clip: (1, band, frame)."""
    extractor: Any = transformer.processor.feature_extractor
    if clip.rate != extractor.sampling_rate:
        raise BadMedia(
            f"{clip.name} has {clip.rate} samples a second, and the model hears "
            f"{extractor.sampling_rate}; resample it, say with: ffmpeg -i IN.wav -ar "
            f"{extractor.sampling_rate} -ac 1 OUT.wav"
        )
    longest = getattr(extractor, "n_samples", None)
    if longest and len(clip.samples) > longest:
        raise BadMedia(
            f"{clip.name} lasts {len(clip.samples) / clip.rate:.1f} s, and the model hears "
            f"{longest / clip.rate:.0f} s at most; cut it, and its transcript, into pieces"
        )
    found = extractor(clip.samples, sampling_rate=clip.rate, return_tensors="pt")["input_features"]
    wanted = sound_shape(transformer.model.config)
    if tuple(found.shape[1:]) != wanted:
        raise BadMedia(
            f"the processor makes {found.shape[1]} bands of {found.shape[2]} frames, and the model "
            f"takes {wanted[0]} of {wanted[1]}; load the processor that belongs to it"
        )
    return torch.as_tensor(found)


def _example(
    transformer: Transformer, clip: Clip, document: int, policy: Positions, held_back: bool
) -> Example:
    """The transcript as the decoder writes it, and the token that follows each kept position."""
    tokenizer: Any = transformer.tokenizer
    config = transformer.model.config
    # Decoders write a space before the first word too.
    words = tokenizer(f" {clip.transcript.strip()}", add_special_tokens=False)["input_ids"]
    before = _before(tokenizer(f" {clip.transcript.strip()}")["input_ids"], words)
    if before[:1] != [config.decoder_start_token_id]:
        before = [config.decoder_start_token_id, *before]
    ids = [*before, *words, config.eos_token_id]
    if len(ids) - 1 > config.max_target_positions:
        raise BadMedia(
            f"the transcript of {clip.name} has {len(ids) - 1} tokens, and the model writes "
            f"{config.max_target_positions} at most; cut it, and the recording, into pieces"
        )
    keep = policy.choose(range(len(before) - 1, len(ids) - 1), clip.transcript)
    gold = tuple(ids[position + 1] for position in keep)
    return Example(document, tuple(ids[:-1]), tuple(keep), held_back, gold)


def _before(ids: list[int], words: list[int]) -> list[int]:
    """The tokens that the tokenizer puts before the words: start, language, task."""
    for start in range(len(ids) - len(words) + 1):
        if ids[start : start + len(words)] == words:
            return ids[:start]
    return []


def _batch(
    transformer: Transformer, features: Tensor, examples: list[Example], index: int
) -> Batch:
    padded = collate(transformer, examples, index)
    inputs = {
        "input_features": features,
        "decoder_input_ids": padded.inputs["input_ids"],
        "decoder_attention_mask": padded.inputs["attention_mask"],
    }
    gold = torch.tensor([token for example in examples for token in example.gold])
    return replace(padded, inputs=ready(transformer.model, inputs), gold=gold)


def _checked(clips: Iterable[Any]) -> Iterator[Clip]:
    for clip in clips:
        if not isinstance(clip, Clip):
            raise BadMedia(f"an item is of type {type(clip).__name__}; a Clip was wanted")
        if clip.samples.ndim != 1 or clip.samples.dtype.kind != "f" or not len(clip.samples):
            raise BadMedia(
                f"{clip.name} holds {clip.samples.dtype} of shape {clip.samples.shape}; floating "
                "numbers of (sample,), one channel, were wanted"
            )
        if not clip.transcript.strip():
            raise BadMedia(f"{clip.name} has no transcript, which teacher forcing needs")
        yield clip


def _from_file(path: Path) -> Clip:
    beside = path.with_suffix(".txt")
    try:
        transcript = " ".join(beside.read_text(encoding="utf8").split())
    except FileNotFoundError as error:
        raise BadMedia(
            f"{path.name} has no transcript: {beside.name} was wanted beside it, with what is said"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadMedia(f"{beside} cannot be read ({error}); UTF-8 text was wanted") from error
    if not transcript:
        raise BadMedia(f"{beside} is empty; what is said in {path.name} was wanted")
    return Clip(path.name, *read_wav(path), transcript)


def read_wav(path: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Samples from -1 to 1, and how many there are a second."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate = file.getnchannels(), file.getsampwidth(), file.getframerate()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        reason = str(error) or "it ends too early"
        raise BadMedia(
            f"{path} cannot be read as a .wav file of plain samples ({reason}); check the file"
        ) from error
    if channels != 1:
        raise BadMedia(f"{path} has {channels} channels; one was wanted, so mix them first")
    if width not in SAMPLE_BYTES:
        raise BadMedia(f"{path} has {8 * width} bits a sample; 8, 16 or 32 were wanted")
    samples = np.frombuffer(data, SAMPLE_BYTES[width]).astype(np.float32)
    if not len(samples):
        raise BadMedia(f"{path} is empty; a recording was wanted")
    return samples / 2 ** (8 * width - 1) - (width == 1), rate  # 8 bits count from 0 upwards
