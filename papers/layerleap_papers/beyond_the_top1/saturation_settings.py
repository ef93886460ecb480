"""Settings of the saturation study, and the sizes that suit what a model reads.

In: plain values. Out: `SaturationSettings`, checked.
"""

from dataclasses import dataclass, replace
from typing import Self

from layerleap import ShortcutBank, Transformer
from layerleap.errors import BadSettings
from layerleap.lens import require_ranks
from layerleap.stream import DENSEST_MASKS, Modality, modality
from layerleap.study import TextSettings, option

# How much to fit on and to read. A clip has about twenty positions, all of which are read, and its
# encoder takes as long as a page of text.
SIZES: dict[Modality, tuple[int, int]] = {
    "text": (3000, 800),
    "images": (3000, 800),
    "sound": (200, 120),
}
# For a first look of two minutes. Passes over text take most of the time, so several positions of
# few texts are used.
QUICK: dict[Modality, tuple[int, int]] = {
    "text": (200, 24),
    "images": (600, 120),
    "sound": (40, 30),
}
FEWEST_DRAWS = 19  # with fewer no p-value reaches 0.05


@dataclass(frozen=True)
class SaturationSettings(TextSettings):
    """What the saturation study does, and with how much data."""

    n_fit: int | None = option(
        None,
        "Texts, images or clips to fit on; 3000 by default, 200 clips.",
        flags=("--fit-texts",),
    )
    n_read: int | None = option(
        None, "Held-out ones to read; 800 by default, 120 clips.", flags=("--read-texts",)
    )
    positions: str | None = option(
        None,
        "'one' random position per text, 'all', or 'every:N'. By default every:4, 'one' for masked "
        "models, 'all' for speech.",
    )
    bank: ShortcutBank | str | None = option(  # noqa: RUF009
        None, "Folder or hub name of a bank to read through; fitted when left out.", parse=str
    )
    k: int = option(5, "How many ranks, 3 or more.", flags=("--ranks", "-k"))
    draws: int = option(999, "Draws of each null of order.")
    walk_share: float = option(0.5, "Share of positions that random walks are made for.")
    permutations: int = option(
        39, "How often the labels of the probe are permuted.", least=1, quick=19
    )
    cells: int = option(
        3000, "(Position, layer) that a probe is trained on, at most.", least=1, quick=600
    )
    pairs: int = option(100, "Pairs of positions in the intervention, at most.", least=1, quick=16)
    reach: int = option(
        5, "Layers around the saturation layer at which states are patched in.", least=1, quick=1
    )
    prompts: int = option(
        4,
        "Prompts that exit rules continue when they are timed; 0 leaves the timing out.",
        least=0,
        quick=0,
    )
    tolerance: float = option(
        0.05, "Largest disagreement of calibrated exits, as a share.", within=(0, 1)
    )
    delta: float = option(
        0.05, "How often calibration may break that promise, as a share.", within=(0, 1)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws < FEWEST_DRAWS:
            raise BadSettings(
                f"draws is {self.draws}, which cannot give a p-value of 0.05; expected "
                f"{FEWEST_DRAWS} or more"
            )
        if self.k < 3:
            raise BadSettings(f"k is {self.k}; expected 3 ranks or more, to have an order")
        if not 0 < self.walk_share <= 1:
            raise BadSettings(f"walk_share is {self.walk_share}; expected above 0 and at most 1")

    def scaled_down(self) -> "SaturationSettings":
        """Smaller sizes for a first look; how many texts that is depends on the model."""
        return _Quick(**vars(super().scaled_down()))

    def resolved(self, model: Transformer) -> Self:
        """Text, sizes and positions that suit the model; a bank given by name is loaded."""
        require_ranks(model, self.k)
        bank = ShortcutBank.from_pretrained(self.bank) if isinstance(self.bank, str) else self.bank
        if bank is not None:
            bank.check_model(model)
        kind = modality(model)
        usual = "one" if model.kind == "masked-token" else "every:4"
        n_fit, n_read = SIZES[kind]
        sized = replace(self, n_fit=self.n_fit or n_fit, n_read=self.n_read or n_read)
        return replace(
            sized,
            text=sized.main_text(model),
            bank=bank,
            positions=self.positions or ("all" if kind == "sound" else usual),
        )


class _Quick(SaturationSettings):
    """Settings whose sizes are capped once the model is known."""

    def resolved(self, model: Transformer) -> Self:
        n_fit, n_read = QUICK[modality(model)]
        small = replace(
            self, n_fit=min(self.n_fit or n_fit, n_fit), n_read=min(self.n_read or n_read, n_read)
        )
        if self.positions is None and modality(model) == "text":
            every = DENSEST_MASKS if model.kind == "masked-token" else 2
            small = replace(small, positions=f"every:{every}")
        return super(_Quick, small).resolved(model)
