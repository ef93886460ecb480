"""Settings of a suitability study: plain values, checked without a model and without torch."""

from dataclasses import asdict, dataclass, field
from typing import Any

from layerleap.errors import BadSettings
from layerleap.stream.sampling import Sampling


@dataclass(frozen=True)
class SuitabilitySettings:
    """Settings of a suitability study."""

    text: str | None = None  # None is the default text of the model: wikipedia, or generated
    tolerance: float = 0.05  # largest fraction of answers that may differ from the full model's
    delta: float = 0.05  # how often, over calibration sets, the guarantee may fail
    n_fit: int = 2000  # texts to fit maps on, unless a bank is passed
    n_read: int = 1000  # held-out texts to read
    context: int = 32  # context length of a timed answer, in tokens
    repeats: int = 20  # timed passes
    starts: str | None = None  # real sequences from which a masked model draws its texts
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        for name in ("tolerance", "delta"):
            if not 0 < getattr(self, name) < 1:
                raise BadSettings(
                    f"{name} {getattr(self, name)} is out of range; expected between 0 and 1"
                )
        for name in ("n_fit", "n_read", "repeats"):
            if getattr(self, name) < 1:
                raise BadSettings(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.context < 2:
            raise BadSettings(f"context is {self.context} tokens; expected at least 2")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the fields of `sampling` among them."""
        flat = asdict(self)
        return {**{k: v for k, v in flat.items() if k != "sampling"}, **flat["sampling"]}
