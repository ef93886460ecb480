"""The bodies of requests, with their limits."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from layerleap.show.web import limits
from layerleap.show.web.frames import TextSide
from layerleap.show.web.store import state_text


def _carried(state: dict[str, Any]) -> dict[str, Any]:
    """Refuse what Python reads as JSON but cannot write as such, NaN for example."""
    state_text(state)
    return state


def _without_files(edit: str) -> str:
    """Refuse an edit along a saved direction: no path is taken from the browser."""
    if edit.strip()[:1] in ("h", "H"):
        raise ValueError("the page takes no files; add a direction in Python or by --edit")
    return edit


Number = Annotated[int, Field(ge=0, lt=2**31)]
Edit = Annotated[str, Field(min_length=1, max_length=400), AfterValidator(_without_files)]
Edits = Annotated[list[Edit], Field(max_length=limits.EDITS)]
Top = Annotated[int, Field(ge=1, le=limits.TOP)]
State = Annotated[dict[str, Any], AfterValidator(_carried)]
Name = Annotated[str, Field(max_length=limits.NAME)]


class Body(BaseModel):
    """The body of a request; unknown fields are refused, because they are mistakes."""

    model_config = ConfigDict(extra="forbid")


class Text(Body):
    """A piece of text."""

    text: Annotated[str, Field(max_length=limits.TEXT)]


class Input(Body):
    """A prompt: token ids, or a text that is still to be cut into tokens."""

    ids: Annotated[list[Number], Field(max_length=limits.IDS)] | None = None
    text: Annotated[str, Field(max_length=limits.TEXT)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "Input":
        if (self.ids is None) == (self.text is None):
            raise ValueError("expected either ids or text")
        return self


class Trace(Body):
    """A prompt to read at every layer."""

    input: Input
    lens: Annotated[str, Field(max_length=20)] = "logit"
    watch: Number | None = None
    edits: Edits = []
    top: Top = 5
    follow: Annotated[list[Number], Field(max_length=limits.FOLLOW)] = []
    selected: Number | None = None


class Cell(Body):
    """One block at one position, to be read closely."""

    input: Input
    block: Annotated[int, Field(ge=1, lt=2**31)]
    position: Number
    lens: Annotated[str, Field(max_length=20)] = "logit"
    watch: Number | None = None
    edits: Edits = []
    top: Top = 10


class Generate(Body):
    """A prompt to continue, with and without edits."""

    input: Input
    edits: Edits = []
    max_new_tokens: Annotated[int, Field(ge=1, le=limits.NEW_TOKENS)] = 20
    sides: Annotated[list[TextSide], Field(min_length=1, max_length=2)] = ["plain", "edited"]


class VectorName(Body):
    """What the user calls a value vector; empty takes the name away."""

    name: Name
    note: Annotated[str, Field(max_length=limits.NOTE)] = ""


class Session(Body):
    """What the page wants to find again; only the page knows what is inside `state`."""

    title: Name
    state: State


class Export(Body):
    """A session to be written down for others."""

    state: State
