"""The shapes of streamed frames: traces and generated texts, a JSON object per line.

In: frames of the debugger. Out: validated ones. Ranks count from 1 here, and from 0 there.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from layerleap.show.web.schemas import Answer, Json, Token

Side = Literal["before", "after"]  # of edits
TextSide = Literal["plain", "edited"]


class Guess(NamedTuple):
    """A token and its probability."""

    id: int
    probability: float


class Place(NamedTuple):
    """The probability and rank of a token that is followed."""

    probability: float
    rank: int


class Cell(Answer):
    """One reading of the grid; `change` is KL between the readings without and with edits."""

    layer: int
    position: int
    top: list[Guess]
    final: Place
    watch: Place | None
    follow: dict[int, Place]  # by id, of the pinned tokens
    agrees: bool
    kl: float
    entropy: float
    changed: bool
    change: float | None


class AppliedEdit(Answer):
    """An edit of a run, and whether it met a position."""

    spec: str
    sentence: str
    applied: bool
    remark: str


class Stop(Answer):
    """Where early exit would stop; `agrees` if its token is the model's answer."""

    layer: int
    agrees: bool
    top: Token
    answer: Token


class Exits(Answer):
    """Where early exit would stop without and with edits."""

    before: Stop | None
    after: Stop | None


class QueuedFrame(Answer):
    """How many requests are ahead."""

    frame: Literal["queued"] = "queued"
    place: int


class ErrorFrame(Answer):
    """Why a stream ends early; `place` if the server is busy."""

    frame: Literal["error"] = "error"
    error: str
    place: int | None = None


class MetaFrame(Answer):
    """What a trace is of; `selected` is the position that comes first."""

    frame: Literal["meta"] = "meta"
    tokens: list[Token]
    positions: list[int]
    layers: list[int]
    selected: int
    lens: str
    edits: list[AppliedEdit]
    lowest: int | None


class CellsFrame(Answer):
    """Some cells of a trace, and the tokens in them that have not been named before."""

    frame: Literal["cells"] = "cells"
    side: Side
    names: dict[int, Token]
    cells: list[Cell]


class SaturationFrame(Answer):
    """From which layer on the top token of a position is the final one."""

    frame: Literal["saturation"] = "saturation"
    position: int
    before: int
    after: int | None
    exits: Exits


class DoneFrame(Answer):
    """The end of a trace."""

    frame: Literal["done"] = "done"
    seconds: float


class StartFrame(Answer):
    """The beginning of a generated text."""

    frame: Literal["start"] = "start"
    side: TextSide


class TokenFrame(Answer):
    """A generated token and the text that it adds."""

    frame: Literal["token"] = "token"
    side: TextSide
    id: int
    piece: str
    label: str


class TextFrame(Answer):
    """The end of a generated text."""

    frame: Literal["done"] = "done"
    side: TextSide
    text: str
    seconds: float


class EndFrame(Answer):
    """The end of all generated texts."""

    frame: Literal["end"] = "end"


TracedFrame = MetaFrame | CellsFrame | SaturationFrame | DoneFrame
TraceFrame = QueuedFrame | TracedFrame | ErrorFrame
GenerateFrame = QueuedFrame | StartFrame | TokenFrame | TextFrame | EndFrame | ErrorFrame
_TRACED: TypeAdapter[TracedFrame] = TypeAdapter(
    Annotated[TracedFrame, Field(discriminator="frame")]
)


def traced(frame: Json) -> TracedFrame:
    """A frame of the debugger's trace in the shape that the page reads."""
    for cell in frame.get("cells", ()):
        cell["final"], cell["watch"] = _counted(cell["final"]), _counted(cell["watch"])
        cell["follow"] = {token: _counted(place) for token, place in cell["follow"].items()}
    return _TRACED.validate_python(frame)


def _counted(place: list[Any] | None) -> tuple[float, int] | None:
    return None if place is None else (place[0], place[1] + 1)
