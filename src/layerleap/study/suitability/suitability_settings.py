"""Settings of the suitability study: the text, the guarantee and what is timed."""

from dataclasses import dataclass, replace
from pathlib import Path

from layerleap.errors import BadSettings
from layerleap.extras import learn_library, need
from layerleap.maps.bank import ShortcutBank
from layerleap.maps.map_settings import check_solving
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import DENSEST_MASKS, longest_input, require_text
from layerleap.study.engine import option
from layerleap.study.fits import FitSettings
from layerleap.study.result import Row
from layerleap.study.suitability.candidates import layer_sets

QUICK_POSITIONS = {"next-token": "every:4", "masked-token": f"every:{DENSEST_MASKS}"}


@dataclass(frozen=True)
class SuitabilitySettings(FitSettings):
    """What the suitability study does, and with how much data."""

    n_fit: int | None = option(2000, "Texts to fit on.", flags=("--fit-texts",), quick=300)
    n_read: int | None = option(1000, "Held-out texts to read.", flags=("--read-texts",), quick=240)
    positions: str | None = option(
        "one",
        "'one' random position per text, 'all', or 'every:N'. With --quick every 4th, or every "
        f"{DENSEST_MASKS}th of a masked model.",
    )
    bank: ShortcutBank | str | Path | None = option(  # noqa: RUF009
        None,
        "Folder or hub name of a bank; by default, maps are fitted on the text. With a bank, the "
        "text may also be '-', for standard input.",
        parse=str,
    )
    tolerance: float = option(
        0.05, "Largest share of answers that may differ from the full model's.", within=(0, 1)
    )
    delta: float = option(0.05, "How often that guarantee may fail, as a share.", within=(0, 1))
    context: int = option(32, "Context length of a timed answer, in tokens.", least=2)
    repeats: int = option(20, "Passes that are timed.", least=1, quick=10)

    def __post_init__(self) -> None:
        super().__post_init__()
        for library in ("scipy", "sklearn"):
            need(library, "learn")

    @property
    def reads_once(self) -> bool:
        """Whether the text is only read, because there is a bank already."""
        return self.bank is not None

    @property
    def bank_name(self) -> str | None:
        """The folder or hub name of the bank, if it was given by name."""
        return str(self.bank) if isinstance(self.bank, str | Path) else None

    def to_dict(self) -> Row:
        """Plain JSON values; a bank is named, or told by its digest."""
        bank = self.bank.digest() if isinstance(self.bank, ShortcutBank) else self.bank_name
        return {**super().to_dict(), "bank": bank}

    def outlook(self) -> str:
        """What a run will do."""
        fit = f"fits maps on {self.n_fit:,} texts, " if self.bank is None else ""
        return (
            f"{fit}reads {self.n_read:,} others, times {self.repeats} passes, then replays all "
            "rules"
        )

    def scaled_down(self) -> "SuitabilitySettings":
        """Fewer texts, with several rows of each: passes take most of the time."""
        positions = None if self.positions == "one" else self.positions
        return replace(super().scaled_down(), positions=positions)

    def resolved(self, model: Transformer) -> "SuitabilitySettings":
        """The settings with text and positions decided; refuses what cannot work."""
        if model.kind != "image-class":
            require_text(model)
        for library in ("scipy.stats", "sklearn.linear_model"):
            learn_library(library)  # an installed one may be broken
        layer_sets(model.n_layers)
        check_solving(self.ridge, None, model.d_model)
        if self.context > (limit := longest_input(model)):
            raise BadSettings(
                f"context {self.context} is too long; this model takes at most {limit} tokens"
            )
        positions = self.positions or QUICK_POSITIONS.get(model.kind, "one")
        return replace(self, text=self.main_text(model), positions=positions)
