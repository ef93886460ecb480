"""Settings of the stitching study, and what its sections share.

In: a model and plain values. Out: `StitchingSettings`, checked; and a context that loads the other
models when they are first used, and makes the kernels between them.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from layerleap import LayerleapError, Transformer, load
from layerleap.act.stitch import Carry, kernel_map
from layerleap.errors import BadSettings, BadText
from layerleap.maps import FitReport, LayerPair, embedding_kernel, fit_kernels, shared_tokens
from layerleap.stream import Batch, Sampling, TextCounts, batches_of, require_text
from layerleap.study import Line, Row, TextContext, TextSettings, option
from layerleap.zoo import SHORT, TEXT_NAMES, fetch, is_held_out

LINES = {
    "embedding": Line("embedding kernel", "blue"),
    "folded": Line("folded kernel", "purple", marker="X"),
    "least-squares": Line("fitted kernel", "green", marker="D"),
    "random": Line("random kernel", "grey", marker="s", style="dashed"),
    "identity": Line("identity", "orange", marker="^", style="dashed"),
}
Kernels = dict[tuple[str, LayerPair], Carry]


@dataclass(frozen=True)
class StitchingSettings(TextSettings):
    """What the stitching study does, and with how much data."""

    other: Transformer | str = option(  # noqa: RUF009
        "small-lm-2",
        "The model whose last blocks are used, with the same vocabulary: a bundled or hub name, or "
        "a folder.",
        parse=str,
    )
    classifier: Transformer | str | None = option(  # noqa: RUF009
        "small-lm-reviews",
        "A classifier of texts with the same vocabulary, for the classifier without training; "
        "'none' leaves it out.",
        parse=lambda text: None if text == "none" else text,
    )
    kept_blocks: int = option(
        3, "How many of the classifier's last blocks are stitched on.", least=0
    )
    reviews: str = option("reviews", "Labelled texts: 'reviews', or a .jsonl of text and label.")
    review_length: int = option(
        SHORT, "Characters; longer labelled texts are left out, as they are from training.", least=1
    )
    n_reviews: int = option(600, "Held-out labelled texts to classify.", least=2, quick=60)
    n_fit: int | None = option(600, "Texts to fit kernels on.", flags=("--fit-texts",), quick=100)
    n_read: int | None = option(200, "Held-out texts to read.", flags=("--read-texts",), quick=24)
    positions: str | None = option("all", "'one' random position per text, 'all', or 'every:N'.")
    layers: int = option(
        7, "Layers of each model that are paired, at most; spread evenly.", least=2, quick=4
    )
    ridge: float | None = option(
        None, "Penalty of fitted kernels; by default none, unless rows are few.", least=0
    )
    max_tokens: int = option(128, "Longer texts are cut here.", quick=64)

    def resolved(self, model: Transformer) -> "StitchingSettings":
        """The settings with the text decided."""
        require_text(model)
        if model.kind != "next-token":
            raise BadSettings(
                f"{model.identity.name} does not predict the next token; expected a language model "
                "whose first blocks are stitched"
            )
        return replace(self, text=self.main_text(model), positions=self.positions or "all")

    def to_dict(self) -> Row:
        """Plain JSON values; models are named."""
        names = {"other": name_of(self.other), "classifier": name_of(self.classifier)}
        return {**super().to_dict(), **names}


def name_of(model: Transformer | str | None) -> str | None:
    """The name of a model, loaded or not."""
    return model.identity.name if isinstance(model, Transformer) else model


class StitchingContext(TextContext[StitchingSettings]):
    """Both models, the classifier, and kernels between them."""

    @cached_property
    def other(self) -> Transformer:
        """The model whose last blocks are used."""
        other = self._loaded(self.settings.other)
        if other.kind != "next-token":
            raise BadSettings(
                f"{other.identity.name} does not predict the next token; expected a language "
                "model, whose loss can be measured"
            )
        embedding_kernel(self.model, other)  # refuses what cannot be stitched, before any work
        return other

    @cached_property
    def classifier(self) -> Transformer:
        """The classifier whose last blocks are stitched on."""
        assert self.settings.classifier is not None
        classifier = self._loaded(self.settings.classifier)
        if classifier.kind != "text-class":
            raise BadSettings(
                f"{classifier.identity.name} is not a classifier of texts; expected one, such as "
                "small-lm-reviews"
            )
        if self.settings.kept_blocks > classifier.n_layers:
            raise BadSettings(
                f"kept_blocks is {self.settings.kept_blocks}, but {classifier.identity.name} has "
                f"{classifier.n_layers} blocks"
            )
        shared_tokens(self.model, classifier)
        return classifier

    def _loaded(self, model: Transformer | str) -> Transformer:
        if isinstance(model, Transformer):
            return model
        self.progress(f"preparing {model}", 0, 1, "models")
        return load(model)

    def fingerprint(self) -> Any:
        """Digests of both sides of the text and of the other models."""
        others: list[Any] = [self.other.identity.fingerprint]
        try:
            others += [self.classifier.identity.fingerprint] if self.settings.classifier else []
        except LayerleapError as error:  # its section says so
            others.append(str(error))
        return [super().fingerprint(), others]

    def grid(self, model: Transformer) -> list[int]:
        """Layers from 0 to the last, spread evenly."""
        n, count = model.n_layers, min(self.settings.layers, model.n_layers + 1)
        return sorted({round(step * n / (count - 1)) for step in range(count)})

    def kernels(
        self, b: Transformer, pairs: list[LayerPair], batches: Iterator[Batch], total: int | None
    ) -> tuple[Kernels, list[FitReport]]:
        """Every kernel for every pair of layers, and how the fitted ones were fitted."""
        a, s = self.model, self.settings
        fitted = fit_kernels(
            a, b, pairs, batches, ridge=s.ridge, n_texts=total, progress=self.progress
        )
        kernels: Kernels = {("least-squares", pair): carry for pair, (carry, _) in fitted.items()}
        names = ["embedding", "folded", "random", *(["identity"] if a.d_model == b.d_model else [])]
        for name in names:
            carry = kernel_map(name, a, 0, b, 0, s.seed)  # the same for all pairs
            kernels |= {(name, pair): carry for pair in pairs}
        return kernels, [report for _, report in fitted.values()]

    def reviews(self) -> list[tuple[str, int]]:
        """The labelled texts that are short enough, in the order of the file."""
        name = self.settings.reviews
        path = fetch(name) if name in TEXT_NAMES else Path(name)
        try:
            with path.open(encoding="utf8") as lines:
                records = [json.loads(line) for line in lines if line.strip()]
            labelled = [(str(record["text"]), int(record["label"])) for record in records]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadText(
                f"{name} cannot be read as labelled texts ({type(error).__name__}: {error}); "
                "expected a .jsonl file whose records have a text and a label from 0 on"
            ) from error
        short = [review for review in labelled if len(review[0]) <= self.settings.review_length]
        if not short:
            raise BadText(
                f"{name} has no labelled text of at most {self.settings.review_length} characters; "
                "expected at least two"
            )
        return short

    def review_batches(self) -> tuple[Iterator[Batch], int]:
        """Reviews to fit kernels on, without their verdicts, and how many; none is held out."""
        s, started = self.settings, time.monotonic()
        assert s.n_fit is not None
        texts = [text for text, _ in self.reviews() if not is_held_out(text)]
        chosen = texts[:: max(1, len(texts) // s.n_fit)][: s.n_fit]
        sampling = Sampling(
            unit="document", positions="every:4", max_tokens=s.max_tokens, seed=s.seed
        )

        def batches() -> Iterator[Batch]:
            text_counts = TextCounts()
            yield from batches_of(
                self.model, chosen, sampling, side="both", text_counts=text_counts
            )
            self.read("fit kernels", s.reviews, text_counts.to_dict(), started)

        return batches(), len(chosen)

    def describe(self) -> Row:
        """Names and sizes of both models, for sentences."""
        row: Row = {"classifier": name_of(self.settings.classifier)}
        for side, model in (("a", self.model), ("b", self.other)):
            row |= {side: model.identity.name, f"layers_{side}": model.n_layers}
            row[f"d_{side}"] = model.d_model
        return row
