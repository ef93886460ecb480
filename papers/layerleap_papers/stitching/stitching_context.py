"""What the sections of the stitching study share: the other models, and which layers are paired.

In: a model and settings. Out: a context that loads the other models when they are first used.
"""

import json
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from layerleap import LayerleapError, Transformer, load
from layerleap.act.stitch import Carry, kernel_map
from layerleap.errors import BadSettings, BadText
from layerleap.maps import FitReport, LayerPair, embedding_kernel, fit_kernels, shared_tokens
from layerleap.stream import Batch, Census, Sampling, batches_of
from layerleap.study import TextContext
from layerleap.zoo import TEXT_NAMES, fetch, is_held_out
from layerleap_papers.stitching.stitching_settings import StitchingSettings, name_of

KERNELS = ("embedding", "folded", "least-squares", "random", "identity")  # in the order of figures
Kernels = dict[tuple[str, LayerPair], Carry]


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
        messages = 0

        def tell(_: str) -> None:
            nonlocal messages
            messages += 1
            self.progress(f"preparing {model}", messages, None, "steps")

        return load(model, tell=tell)

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
        a, seed = self.model, self.settings.seed
        fitted = fit_kernels(
            a, b, pairs, batches, ridge=self.settings.ridge, n_texts=total, progress=self.progress
        )
        kernels: Kernels = {("least-squares", pair): own for pair, (own, _) in fitted.items()}
        names = ["embedding", "folded", "random", *(["identity"] if a.d_model == b.d_model else [])]
        for name in names:
            carry = kernel_map(name, a, 0, b, 0, seed)  # the same for all pairs
            kernels |= {(name, pair): carry for pair in pairs}
        return kernels, [report for _, report in fitted.values()]

    def reviews(self) -> list[tuple[str, int]]:
        """The labelled texts that are short enough, in the order of the file."""
        name = self.settings.reviews
        path = fetch(name) if name in TEXT_NAMES else Path(name)
        try:
            with path.open(encoding="utf8") as lines:
                records = [json.loads(line) for line in lines if line.strip()]
            found = [(str(one["text"]), int(one["label"])) for one in records]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadText(
                f"{name} cannot be read as labelled texts ({type(error).__name__}: {error}); "
                "expected a .jsonl file whose records have a text and a label from 0 on"
            ) from error
        short = [one for one in found if len(one[0]) <= self.settings.review_length]
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
            census = Census()
            yield from batches_of(self.model, chosen, sampling, side="both", census=census)
            self.read("fit kernels", s.reviews, census.to_dict(), started)

        return batches(), len(chosen)

    def describe(self) -> dict[str, Any]:
        """Names and sizes of both models, for sentences."""
        a, b = self.model, self.other
        return {
            "a": a.identity.name,
            "b": b.identity.name,
            "layers_a": a.n_layers,
            "layers_b": b.n_layers,
            "d_a": a.d_model,
            "d_b": b.d_model,
            "classifier": None
            if self.settings.classifier is None
            else name_of(self.settings.classifier),
        }
