"""What the study of saturation does: sizes, text and sections, checked.

In: plain values. Out: `SaturationSettings`, and how a text is cut for a model by default.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from layerleap.errors import BadSettings
from layerleap.models.transformer import Transformer
from layerleap.stream.batches import Reads, reads
from layerleap.stream.examples import Sampling
from layerleap.stream.source import default_text

# What there is to fit on and to read by default: a clip has some twenty positions, all of them
# read, and the encoder behind them takes as long as a page of text.
SIZES: dict[Reads, tuple[int, int]] = {
    "text": (3000, 800), "images": (3000, 800), "sound": (200, 120),
}  # fmt: skip
QUICK: dict[Reads, tuple[int, int]] = {
    "text": (600, 120), "images": (600, 120), "sound": (60, 40),
}  # fmt: skip
SECTIONS = ("guesses", "probe", "intervention", "exits", "twin")


@dataclass(frozen=True)
class SaturationSettings:
    """What the study does."""

    text: str | None = None  # None is what suits the model
    n_fit: int | None = None  # texts, images or clips to fit maps on; None is what suits the model
    n_read: int | None = None  # held-out ones to read
    k: int = 5  # ranks
    sections: tuple[str, ...] = SECTIONS  # what is studied besides order
    draws: int = 999  # of each null of order
    walk_share: float = 0.5  # of the rows, those that random walks are made beside
    permutations: int = 39  # of the probe's labels
    cells: int = 3000  # (row, layer) that a probe is trained on, at most
    pairs: int = 100  # of the intervention, at most
    prompts: int = 4  # that exit rules go on from live, against the clock
    tolerance: float = 0.05  # largest disagreement that calibrated exits may have
    delta: float = 0.05  # how often that promise may be broken
    quick: bool = False  # a first look: far less of everything
    starts: str | None = None  # real sequences from which a masked model draws its texts
    sampling: Sampling | None = None  # None is what suits the model

    def __post_init__(self) -> None:
        self._check_numbers()
        if unknown := [name for name in self.sections if name not in SECTIONS]:
            raise BadSettings(
                f"section {unknown[0]!r} is unknown; of {', '.join(SECTIONS)} were wanted"
            )
        if "-" in (self.text, self.starts):
            raise BadSettings(
                "standard input can be read only once, and a study reads its text several times; "
                "save it to a file first and name that"
            )
        if self.starts is not None and (self.text or "drawn") != "drawn":
            raise BadSettings("starts are for texts that the model draws; leave them out")
        if self.sampling is not None and self.sampling.held_out == 0:
            raise BadSettings("held_out 0 leaves nothing to read; a share above 0 was wanted")

    def _check_numbers(self) -> None:
        for name in ("n_fit", "n_read", "draws", "permutations", "cells", "pairs", "prompts"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is not a number from 1 on")
        if self.draws < 19:
            raise BadSettings(f"{self.draws} draws cannot give a p-value of 0.05; 19 or more")
        if self.k < 3:
            raise BadSettings(f"order among {self.k} ranks (-k); 3 or more were wanted")
        if not 0 < self.walk_share <= 1:
            raise BadSettings(f"walk_share {self.walk_share} is not above 0 and at most 1")
        for name in ("tolerance", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is not between 0 and 1")

    def quickened(self) -> "SaturationSettings":
        """A first look: far less to fit on and to read, all else as it was."""
        return replace(
            self, permutations=min(self.permutations, 19), cells=min(self.cells, 1500),
            pairs=min(self.pairs, 40), prompts=min(self.prompts, 3),
            quick=True,
        )  # fmt: skip

    def settled(self, transformer: Transformer) -> "SaturationSettings":
        """The same with everything decided that depends on the model."""
        text = "drawn" if self.text is None and self.starts is not None else self.text
        kind = reads(transformer)
        few, many = QUICK[kind], SIZES[kind]
        asked = [
            given or usual for given, usual in zip((self.n_fit, self.n_read), many, strict=True)
        ]
        n_fit, n_read = map(min, asked, few) if self.quick else asked
        return replace(
            self, text=text or default_text(transformer), n_fit=n_fit, n_read=n_read,
            sampling=self.sampling or default_sampling(transformer),
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-able."""
        flat = {**asdict(self), "sections": list(self.sections)}  # JSON has no tuples
        sampling = flat.pop("sampling") or {}
        return {**flat, **sampling}


def default_sampling(transformer: Transformer) -> Sampling:
    """Several positions of each text, all of a clip; of a masked model one, which is hidden."""
    if reads(transformer) == "sound":
        return Sampling(positions="all")
    return Sampling(positions="one" if transformer.kind == "masked-token" else "every:4")
