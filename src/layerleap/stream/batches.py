"""Batches for any model, whether it takes text, images or speech.

In: a wrapped model and a source of its modality. Out: `Batch`es.
"""

from collections.abc import Iterator
from typing import Any, Literal

from layerleap.errors import BadSettings, check_choice
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch, Sampling, TextCounts, iter_batches, iter_examples
from layerleap.stream.images import image_batches
from layerleap.stream.sounds import sound_batches
from layerleap.stream.split import Side

Modality = Literal["text", "images", "sound"]
_BY_INPUT: dict[str, Modality] = {"pixel_values": "images", "input_features": "sound"}


def modality(transformer: Transformer) -> Modality:
    """The modality of the model's input."""
    return _BY_INPUT.get(transformer.model.main_input_name, "text")


def check_amounts(n_texts: int | None, tokens_per_batch: int) -> None:
    """Refuse to read no text, or batches of no token; before anything slow."""
    if n_texts is not None and n_texts < 1:
        raise BadSettings(f"n_texts is {n_texts}; expected 1 or more, or None for all")
    if tokens_per_batch < 1:
        raise BadSettings(f"tokens_per_batch is {tokens_per_batch}; expected 1 or more")


def batches_of(
    transformer: Transformer,
    source: Any,
    sampling: Sampling,
    *,
    side: Side = "fit",
    n_texts: int | None = None,
    text_counts: TextCounts | None = None,
    ridge_share: float = 0.0,
    tokens_per_batch: int = 1024,
) -> Iterator[Batch]:
    """Batches of one side of `source`, in a fixed order.

    Args:
        transformer: the model.
        source: anything `iter_documents`, `iter_images` or `iter_clips` accepts, depending on
            the model's modality.
        sampling: how documents are cut into texts and positions chosen, where that applies.
        side: use the documents (images, clips) to fit on, the held-out ones, or both.
        n_texts: stop after that many texts, images or clips.
        text_counts: counts what is read.
        ridge_share: share of the fitting side that is held back to choose a ridge.
        tokens_per_batch: padded tokens per batch of text; ignored for images and speech.
    """
    check_choice(side, Side, "side")
    check_amounts(n_texts, tokens_per_batch)
    text_counts = text_counts if text_counts is not None else TextCounts()
    kind = modality(transformer)
    how: dict[str, Any] = {"side": side, "text_counts": text_counts, "ridge_share": ridge_share}
    how["n_texts"] = n_texts
    if kind == "text":
        examples = iter_examples(transformer, source, sampling, **how)
        return iter_batches(transformer, examples, tokens_per_batch=tokens_per_batch)
    read = image_batches if kind == "images" else sound_batches
    return read(transformer, source, sampling, **how)
