"""Settings of the stitching study."""

from dataclasses import dataclass, replace

from layerleap import Transformer
from layerleap.errors import BadSettings
from layerleap.stream import require_text
from layerleap.study import Row, TextSettings, option
from layerleap.zoo import SHORT


def _none(text: str) -> str | None:
    return None if text == "none" else text


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
        parse=_none,
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
        return {
            **super().to_dict(),
            "other": name_of(self.other),
            "classifier": None if self.classifier is None else name_of(self.classifier),
        }


def name_of(model: Transformer | str) -> str:
    """The name of a model, loaded or not."""
    return model if isinstance(model, str) else model.identity.name
