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
    kept_blocks: int = option(3, "How many of the classifier's last blocks are stitched on.")
    reviews: str = option("reviews", "Labelled texts: 'reviews', or a .jsonl of text and label.")
    review_length: int = option(
        SHORT, "Characters; longer labelled texts are left out, as they are from training."
    )
    n_reviews: int = option(600, "Held-out labelled texts to classify.")
    n_fit: int | None = option(600, "Texts to fit kernels on.", flags=("--fit-texts",))
    n_read: int | None = option(200, "Held-out texts to read.", flags=("--read-texts",))
    positions: str | None = option("all", "'one' random position per text, 'all', or 'every:N'.")
    layers: int = option(7, "Layers of each model that are paired, at most; spread evenly.")
    ridge: float | None = option(
        None, "Penalty of fitted kernels; by default none, unless rows are few."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"kept_blocks": 0, "n_reviews": 2, "review_length": 1, "layers": 2}
        for name, lowest in least.items():
            if (value := getattr(self, name)) < lowest:
                raise BadSettings(f"{name} is {value}; expected {lowest} or more")
        if self.ridge is not None and self.ridge < 0:
            raise BadSettings(f"ridge is {self.ridge}; expected 0 or more")

    def scaled_down(self) -> "StitchingSettings":
        """Few texts, and four layers of each model."""
        assert self.n_fit is not None
        assert self.n_read is not None
        return replace(
            self,
            n_fit=min(self.n_fit, 100),
            n_read=min(self.n_read, 24),
            n_reviews=min(self.n_reviews, 60),
            layers=min(self.layers, 4),
            max_tokens=min(self.max_tokens, 64),
        )

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
