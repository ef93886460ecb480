"""Settings of the study of embedding space, and the sizes that suit a model.

In: plain values. Out: `EmbeddingSettings`, checked.
"""

from dataclasses import dataclass, replace
from typing import Self

from layerleap import ShortcutBank, Transformer
from layerleap.errors import BadSettings, ModelRefused
from layerleap.maps import check_solving
from layerleap.stream import DENSEST_MASKS, modality
from layerleap.study import FitSettings, option

SOUND = (60, 40)  # clips to fit on and to read: an encoder takes as long as a page of text
FEWEST_ROWS = 8  # that inner products are compared of


@dataclass(frozen=True)
class EmbeddingSettings(FitSettings):
    """What the study of embedding space does, and with how much data."""

    n_fit: int | None = option(
        1200,
        "Texts to fit shortcuts on; not used if a bank is given.",
        flags=("--fit-texts",),
        quick=150,
    )
    n_read: int | None = option(160, "Held-out texts to read.", flags=("--read-texts",), quick=14)
    positions: str | None = option(
        None,
        f"'one' random position per text, 'all', or 'every:N'. By default every:4, or "
        f"every:{DENSEST_MASKS} of a masked model.",
    )
    bank: ShortcutBank | str | None = option(  # noqa: RUF009
        None, "Folder or hub name of a bank that carries states; fitted when left out.", parse=str
    )
    k: int = option(
        100, "Top tokens of each vector that are compared.", flags=("--top", "-k"), least=1
    )
    state_k: int = option(50, "Top tokens of a state that are looked for.", least=1)
    active: int = option(5, "Most active vectors of a layer to look among.", least=1)
    vectors: int | None = option(
        None,
        "Neurons, and columns of attention, compared per layer at most; all by default.",
        quick=128,
    )
    fold: bool = option(
        True, "Also read vectors with norms folded in.", flags=("--fold/--no-fold",), quick=False
    )
    kept_rows: int = option(
        1000, "Vectors whose inner products are compared.", least=FEWEST_ROWS, quick=200
    )
    control_vectors: int = option(
        256, "Neurons compared per layer of the untrained twin, at most.", least=2, quick=64
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vectors is not None and self.vectors < 2:
            raise BadSettings(f"vectors is {self.vectors}; expected 2 or more, to shuffle pairs")

    def resolved(self, model: Transformer) -> Self:
        """Text and positions that suit the model, and top tokens that its vocabulary allows."""
        if model.kind.endswith("-class"):
            raise ModelRefused(
                f"{model.identity.name} gives classes, not tokens, so it has no vocabulary to read "
                "its parameters in; expected a language model"
            )
        check_solving(self.ridge, None, model.d_model)
        bank = ShortcutBank.from_pretrained(self.bank) if isinstance(self.bank, str) else self.bank
        if bank is not None:
            bank.check_model(model)
        sized = self
        if modality(model) == "sound":
            most_fit, most_read = SOUND
            n_fit, n_read = self.n_fit or most_fit, self.n_read or most_read
            sized = replace(self, n_fit=min(n_fit, most_fit), n_read=min(n_read, most_read))
        every = DENSEST_MASKS if model.kind == "masked-token" else 4
        return replace(
            sized,
            text=sized.main_text(model),
            bank=bank,
            positions=self.positions or f"every:{every}",
            # Of a small vocabulary, so many tokens would be shared by any two vectors.
            k=min(self.k, max(1, model.d_vocab // 4)),
            state_k=min(self.state_k, max(1, model.d_vocab // 8)),
        )
