"""Which text to stream for a model: the one named, drawn texts, or a default that suits it.

In: a wrapped model and the name of a text, or nothing. Out: a source that `batches_of` reads, and
how to cut it.
"""

import math
import shutil
from dataclasses import replace
from typing import Any

from layerleap.errors import BadSettings
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.batches import reads
from layerleap.stream.drawn import Drawing, drawn
from layerleap.stream.examples import Sampling
from layerleap.stream.spoken import PROGRAM as SPEAKER

DRAWN_BY_DEFAULT = ("rxnfp", "rxnmapper", "mgm")  # bundled, and not speaking English


def resolve_text(
    transformer: Transformer,
    text: Any,
    sampling: Sampling,
    progress: Progress = silent,
    starts: str | None = None,
    n_drawn: int | None = None,
) -> tuple[Any, Sampling]:
    """What to stream for `text`, and how to cut it; draws texts from the model if asked to.

    Args:
        transformer: the model.
        text: anything `iter_documents` reads, "drawn", or None for what suits the model.
        sampling: how texts are cut.
        progress: told while texts are drawn.
        starts: a text of real sequences that a masked model draws from.
        n_drawn: how many texts to draw.
    """
    if starts is not None and text not in (None, "drawn"):
        raise BadSettings(f"sequences to start from are for drawn texts; the text is {text}")
    if starts is not None:
        text = "drawn"
    if text is None:
        text = default_text(transformer)
    if not isinstance(text, str) or text != "drawn":
        return text, sampling
    drawing = Drawing() if n_drawn is None else Drawing(n_texts=n_drawn)
    path = drawn(transformer, drawing, starts=starts, progress=progress)
    return path, replace(sampling, unit="paragraph", per_document=None, field="text")


def enough(n_texts: int, share: float) -> int:
    """How many texts to draw so that about `n_texts` fall to a side of that share."""
    return 1000 * math.ceil(n_texts / share / 1000)  # round numbers, so that runs share a file


def default_text(transformer: Transformer) -> str:
    """Wikipedia, or for bundled models that do not speak English, what they write themselves.

    Image classifiers get the bundled digits. Speech models get sentences that espeak-ng speaks;
    where that is not installed, the bundled recording, which is too short to fit on.
    """
    if (kind := reads(transformer)) != "text":
        heard = "spoken" if shutil.which(SPEAKER) else "beckett"
        return {"images": "mnist", "sound": heard}[kind]
    return "drawn" if transformer.identity.name in DRAWN_BY_DEFAULT else "wikipedia"
