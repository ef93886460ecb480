"""What the server needs of the engine, so that its tests need no model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

Input = str | Sequence[int]


class Labelled(Protocol):
    """Anything that can be written as JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""


class Engine(Protocol):
    """The methods of `layerleap.act.debug.Debugger` that the server translates."""

    @property
    def index(self) -> Any:
        """The concept index, or None."""

    def describe(self) -> dict[str, Any]:
        """The model, as the page shows it."""

    def tokens(self, text: str) -> Sequence[Labelled]:
        """A text cut into tokens."""

    def vocabulary(self, text: str) -> Sequence[Labelled]:
        """Output tokens that a typed text may mean."""

    def trace(
        self,
        text_or_ids: Input,
        *,
        lens: str,
        watch: int | None,
        edits: Sequence[str],
        top: int,
        selected: int | None,
        should_stop: Callable[[], bool],
    ) -> Iterator[dict[str, Any]]:
        """Frames of a reading at every layer and position."""

    def cell(
        self,
        text_or_ids: Input,
        *,
        block: int,
        position: int,
        lens: str,
        watch: int | None,
        edits: Sequence[str],
        top: int,
    ) -> dict[str, Any]:
        """One block at one position."""

    def generate(
        self,
        text_or_ids: Input,
        *,
        edits: Sequence[str],
        max_new_tokens: int,
        on_token: Callable[[Any, str], None],
        should_stop: Callable[[], bool],
    ) -> Any:
        """Continue a prompt."""

    def vector(self, block: int, neuron: int) -> dict[str, Any]:
        """Both token ends of a value vector."""

    def check_neuron(self, block: int, neuron: int) -> None:
        """Raise an error if there is no such neuron."""
