"""Settings of the shortcuts study; the default sizes are the paper's."""

from dataclasses import dataclass, replace
from typing import Self

from layerleap import Transformer
from layerleap.errors import BadSettings, check_choice
from layerleap.maps import check_solving
from layerleap.stream import DENSEST_MASKS, require_text
from layerleap.study import FitSettings, Row, option

DEFAULT_OTHER = "news"


@dataclass(frozen=True)
class ShortcutSettings(FitSettings):
    """What the shortcuts study does, and with how much data."""

    text: str | None = option(
        None,
        "wikipedia, enwik8 (far more articles), news, 'generated' (sampled from the model), a file "
        "(txt, jsonl, parquet, .gz), a folder, or a data set of the hub. By default, what suits "
        "the model and the number of texts.",
        flags=("--text", "-t"),
    )
    n_fit: int | None = option(9000, "Texts to fit on.", flags=("--fit-texts",), quick=180)
    n_read: int | None = option(3000, "Held-out texts to read.", flags=("--read-texts",), quick=28)
    positions: str | None = option(
        "one",
        "'one' random position per text, 'all', or 'every:N'. With --quick every 4th, or every "
        f"{DENSEST_MASKS}th of a masked model.",
    )
    other: str | None = option(
        DEFAULT_OTHER,
        "A second text, for transfer; 'none' leaves it out.",
        parse=lambda text: None if text == "none" else text,
    )
    pairs: str = option("all", "'all' pairs of layers, or 'final': only maps to the last layer.")
    part_texts: int = option(
        300, "Of the texts read, how many are run with parts replaced.", least=1, quick=8
    )
    schedule_texts: int = option(
        300, "Of the texts read, how many are run with jumps in between.", least=1, quick=8
    )
    tuned_rows: int = option(
        23_040, "Rows that each tuned map is trained on, at most.", least=1, quick=1024
    )
    tolerance: float = option(
        0.05, "Largest disagreement of calibrated exits, as a share.", within=(0, 1)
    )
    delta: float = option(
        0.05, "How often calibration may break that promise, as a share.", within=(0, 1)
    )
    beside: tuple[Transformer | str, ...] = option(
        (),
        "Other models to compare agreement with, by relative depth, separated by commas.",
        parse=lambda names: tuple(name.strip() for name in names.split(",")),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.pairs, ("final", "all"), "pairs")
        if "tuned" in (self.text, self.other):
            raise BadSettings("a text cannot be called 'tuned', like the lens; write ./tuned")

    @property
    def other_texts(self) -> tuple[str, ...]:
        """The text for transfer."""
        return () if self.other is None else (self.other,)

    def scaled_down(self) -> Self:
        """Far fewer texts, with several rows of each: passes take most of the time."""
        positions = None if self.positions == "one" else self.positions
        return replace(super().scaled_down(), positions=positions)

    def resolved(self, model: Transformer) -> "ShortcutSettings":
        """The settings with both texts decided; a text is never compared with itself."""
        require_text(model)
        check_solving(self.ridge, None, model.d_model)
        if self.text == self.other not in (None, DEFAULT_OTHER):
            raise BadSettings(f"text and other are both {self.text!r}; expected two texts, or one")
        main, other = self.main_text(model), self.other
        # A model that reads generated texts seldom speaks the language of the news.
        if other == main or (main == "generated" and other == DEFAULT_OTHER):
            other = None
        some = {"next-token": "every:4", "masked-token": f"every:{DENSEST_MASKS}"}
        positions = self.positions or some.get(model.kind, "one")
        return replace(self, text=main, other=other, positions=positions)

    def to_dict(self) -> Row:
        """Plain JSON values; models are named."""
        names = [
            model
            if isinstance(model, str)
            else f"{model.identity.name} ({model.identity.fingerprint[:8]})"
            for model in self.beside
        ]
        return {**super().to_dict(), "beside": names}
