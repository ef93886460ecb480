"""Batches of whatever a model reads: text, images or speech.

In: a wrapped model and a source of its kind. Out: `Batch`es, by the stream of that kind.
"""

from collections.abc import Iterator
from typing import Any, Literal

from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Batch, Census, Sampling, iter_batches, iter_examples
from layerleap.stream.images import image_batches
from layerleap.stream.sounds import sound_batches
from layerleap.stream.split import Side

Reads = Literal["text", "images", "sound"]
_BY_INPUT: dict[str, Reads] = {"pixel_values": "images", "input_features": "sound"}


def reads(transformer: Transformer) -> Reads:
    """What the model is given."""
    return _BY_INPUT.get(transformer.model.main_input_name, "text")


def batches_of(
    transformer: Transformer,
    source: Any,
    sampling: Sampling,
    *,
    side: Side = "fit",
    n_texts: int | None = None,
    census: Census | None = None,
    ridge_share: float = 0.0,
    tokens_per_batch: int = 1024,
) -> Iterator[Batch]:
    """Batches of one side of `source`, in a fixed order.

    Args:
        transformer: the model; what it reads decides which stream it is.
        source: anything `iter_documents`, `iter_images` or `iter_clips` reads.
        sampling: how texts are cut and positions chosen, as far as that applies.
        side: documents (texts, images, clips) to fit on, those held out, or both.
        n_texts: stop after that many texts, images or clips.
        census: filled in as they go by.
        ridge_share: share of what is fitted on that is held back to choose a ridge.
        tokens_per_batch: padded tokens of a text batch; images and clips are counted in pieces.
    """
    census = census if census is not None else Census()
    kind = reads(transformer)
    common: dict[str, Any] = {"side": side, "census": census, "ridge_share": ridge_share}
    if kind == "images":
        return image_batches(transformer, source, sampling, n_images=n_texts, **common)
    if kind == "sound":
        return sound_batches(transformer, source, sampling, n_clips=n_texts, **common)
    examples = iter_examples(transformer, source, sampling, n_texts=n_texts, **common)
    return iter_batches(transformer, examples, tokens_per_batch=tokens_per_batch)
