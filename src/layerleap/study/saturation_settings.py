"""What the study of saturation does: sizes, text and sections, checked.

In: plain values. Out: `SaturationSettings`, and how a text is cut for a model by default.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from layerleap.errors import BadSettings
from layerleap.models.transformer import Transformer
from layerleap.stream.examples import Sampling

SECTIONS = ("guesses", "probe", "intervention", "exits", "twin")


@dataclass(frozen=True)
class SaturationSettings:
    """What the study does."""

    text: str | None = None  # None is what suits the model
    n_fit: int = 3000  # texts, images or clips to fit maps on
    n_read: int = 800  # held-out ones to read
    k: int = 5  # ranks
    sections: tuple[str, ...] = SECTIONS  # what is studied besides order
    draws: int = 999  # of each null of order
    walk_share: float = 0.2  # of the rows, those that random walks are made beside
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
            if getattr(self, name) < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is not a number from 1 on")
        if self.draws < 19:
            raise BadSettings(f"{self.draws} draws cannot give a p-value of 0.05; 19 or more")
        if self.k < 3:
            raise BadSettings(f"order among {self.k} ranks; 3 or more were wanted")
        if not 0 < self.walk_share <= 1:
            raise BadSettings(f"walk_share {self.walk_share} is not above 0 and at most 1")
        for name in ("tolerance", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is not between 0 and 1")

    def quickened(self) -> "SaturationSettings":
        """A first look: far less to fit on and to read, all else as it was."""
        return replace(
            self, n_fit=min(self.n_fit, 600), n_read=min(self.n_read, 120),
            permutations=min(self.permutations, 19), cells=min(self.cells, 1500),
            pairs=min(self.pairs, 40), prompts=min(self.prompts, 3),
            walk_share=max(self.walk_share, 0.4), quick=True,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Flat and JSON-able."""
        flat = {**asdict(self), "sections": list(self.sections)}  # JSON has no tuples
        sampling = flat.pop("sampling") or {}
        return {**flat, **sampling}


def default_sampling(transformer: Transformer) -> Sampling:
    """Several positions of each text; of a masked model one, which is hidden from it."""
    return Sampling(positions="one" if transformer.kind == "masked-token" else "every:4")
