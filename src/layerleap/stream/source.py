"""Choosing a text: which one suits a model, and what to stream for it.

In: a wrapped model and a text, or None. Out: a source that `batches_of` reads, and its `Sampling`.
"""

import math
import shutil
from dataclasses import replace
from typing import Any

from layerleap.errors import BadSettings, BadText
from layerleap.models.transformer import Transformer
from layerleap.progress import Progress, silent
from layerleap.stream.batches import modality
from layerleap.stream.examples import Sampling, reads_pairs
from layerleap.stream.generated import TextGeneration, generated_texts
from layerleap.stream.places import SPEAKER
from layerleap.stream.text_pairs import TITLES

# What a bundled model was trained for.
OWN_TEXTS = {
    **dict.fromkeys(("bert-reviews", "small-lm-reviews", "smollm2-reviews"), "reviews"),
    "flan-t5-small": TITLES,
}
NOT_ENGLISH = ("rxnfp", "rxnmapper", "mgm")  # bundled models trained on something else

MANY_TEXTS = 3000


def resolve_text(
    transformer: Transformer,
    text: Any,
    sampling: Sampling,
    progress: Progress = silent,
    starts: str | None = None,
    n_generated: int | None = None,
) -> tuple[Any, Sampling]:
    """The source to stream for `text` and how to cut it; generates texts if asked to.

    Args:
        transformer: the model.
        text: anything `batches_of` reads, "generated", or None for the model's default.
        sampling: how texts are cut.
        progress: called while texts are generated.
        starts: a text of real sequences that a masked model starts from.
        n_generated: how many texts to generate.
    """
    if starts is not None:
        if text not in (None, "generated"):
            raise BadSettings(
                f"starts is only used for generated texts, but the text is {text}; leave starts "
                "out, or ask for the text 'generated'"
            )
        text = "generated"
    if text is None:
        text = default_text(transformer)
    if not isinstance(text, str) or text != "generated":
        return text, sampling
    settings = TextGeneration() if n_generated is None else TextGeneration(n_texts=n_generated)
    path = generated_texts(transformer, settings, starts=starts, progress=progress)
    return path, replace(sampling, unit="paragraph", per_document=None, field="text")


def n_to_generate(n_texts: int, share: float) -> int:
    """How many texts to generate so that a side with that share of them gets about `n_texts`."""
    return 1000 * math.ceil(n_texts / share / 1000)  # rounded up, so that runs share a file


def default_text(transformer: Transformer, n_texts: int = 0) -> str:
    """The text that suits the model: English, or "generated" for those not trained on it.

    "wikipedia" downloads quickly, but has only a hundred articles: those who read many texts
    (`n_texts`, on both sides together) get "enwik8". The classifier of film reviews gets film
    reviews. Image classifiers get the bundled digits. Speech models get sentences spoken by
    espeak-ng, or, if that is not installed, the bundled recording, which is too short to fit on.
    """
    if (kind := modality(transformer)) != "text":
        speech = "spoken" if shutil.which(SPEAKER) else "beckett"
        return {"images": "mnist", "sound": speech}[kind]
    name = transformer.identity.name
    if reads_pairs(transformer) and name not in OWN_TEXTS:
        raise BadText(
            f"{name} reads pairs of texts; give a .tsv file (source, tab, "
            "target), a .jsonl file with these fields, tuples, or 'titles' (of English articles)"
        )
    if name in NOT_ENGLISH:
        return "generated"
    return OWN_TEXTS.get(name, "enwik8" if n_texts > MANY_TEXTS else "wikipedia")
