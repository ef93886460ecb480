"""How documents are cut into texts and positions chosen: plain values, checked without a model."""

from dataclasses import asdict, dataclass
from typing import Any

from layerleap.arguments import check_fields
from layerleap.errors import BadSettings
from layerleap.stream.positions import parse_positions
from layerleap.stream.split import Unit, check_per_document


@dataclass(frozen=True)
class Sampling:
    """How documents are cut into texts and positions chosen; plain values, written into cards."""

    unit: Unit = "sentence"
    max_tokens: int = 128  # longer texts are truncated
    positions: str = "one"  # "one", "all" or "every:N"
    per_document: int | None = 256  # at most this many texts per document; None for all
    held_out: float = 0.25  # share of documents that are never fitted on
    include_special: bool = False  # masked models: whether [CLS] and [SEP] may be masked and read
    seed: int = 0
    field: str = "text"  # the column or key that holds the text in records

    def __post_init__(self) -> None:
        check_fields(self)
        parse_positions(self.positions)
        if self.max_tokens < 1:
            raise BadSettings(f"max_tokens {self.max_tokens} is too small; expected 1 or more")
        check_per_document(self.per_document)
        if not 0 <= self.held_out < 1:
            raise BadSettings(f"held_out is {self.held_out}; expected at least 0 and below 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def read_shard(text: str) -> tuple[int, int]:
    """A part of the work as typed: "0/4" is the first of four."""
    which, _, of = text.partition("/")
    if not (which.isdigit() and of.isdigit()):
        raise BadSettings(f"shard is {text!r}; expected a form like 0/4")
    return check_shard((int(which), int(of)))


def check_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """The shard, if there is one of that number."""
    if not 0 <= shard[0] < shard[1]:
        raise BadSettings(f"shard {shard[0]} of {shard[1]} does not exist; count from 0")
    return shard
