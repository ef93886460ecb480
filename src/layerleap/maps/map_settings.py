"""How maps are solved and trained: plain values, checked without a model and without torch."""

import math
from dataclasses import dataclass
from typing import Literal

from layerleap.errors import BadSettings, check_choice


@dataclass(frozen=True)
class Tuning:
    """How maps are trained; plain values, written into the bank."""

    max_rows: int = 23_040  # rows per layer at most; the file is read again if needed
    rows_per_step: int = 256
    lr: float = 1e-3  # decays linearly to 0; 3e-3 makes KL worse at first, 1e-2 diverges
    check_every: int = 15  # steps between two checks on the held-out states
    patience: int = 3  # checks without improvement after which a layer stops
    start: Literal["linear", "logit"] = "linear"  # the maps of the bank, or the logit lens
    seed: int = 0  # decides the order of the rows

    def __post_init__(self) -> None:
        for name in ("max_rows", "rows_per_step", "check_every", "patience"):
            if getattr(self, name) < 1:
                raise BadSettings(f"{name} {getattr(self, name)} is too small; expected 1 or more")
        if self.max_rows < self.rows_per_step:
            raise BadSettings(
                f"max_rows {self.max_rows} is less than one step of {self.rows_per_step} rows"
            )
        if not 0 < self.lr < float("inf"):
            raise BadSettings(f"lr {self.lr} is not a valid step size; expected a number above 0")
        check_choice(self.start, ("linear", "logit"), "start")

    @property
    def steps(self) -> int:
        """The number of steps at most."""
        return self.max_rows // self.rows_per_step


def check_solving(ridge: float | str | None, rank: int | None, d_model: int | None) -> None:
    """Refuse an invalid ridge or rank, before a pass over a text; d_model is None if not known."""
    if rank is not None and not 1 <= rank <= (math.inf if d_model is None else d_model):
        raise BadSettings(f"rank {rank} is out of range; expected 1 to {d_model or 'd_model'}")
    is_number = isinstance(ridge, float | int) and 0 <= ridge < math.inf
    if ridge not in (None, "auto") and not is_number:
        raise BadSettings(f"ridge {ridge!r} is invalid; expected 'auto' or a number of at least 0")


def read_ridge(text: str) -> float | str:
    """A number, or "auto"."""
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError as error:
        raise BadSettings(f"ridge is {text!r}; expected a number or 'auto'") from error
