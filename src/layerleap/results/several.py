"""Results of several prompts.

In: one result per prompt. Out: a list of them, which a notebook shows one below the other.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

from layerleap.extras import report_library

R = TypeVar("R")


class Several(list[R]):
    """Results in the order of their prompts, each the same as for its prompt alone."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))

    def __rich_console__(self, *_: Any) -> Iterator[Any]:
        yield from self

    def to_dict(self) -> list[Any]:
        """Plain JSON types, one entry per prompt."""
        return [one.to_dict() for one in self]  # type: ignore[attr-defined]  # all results can

    def to_pandas(self) -> Any:
        """The data frames of all results, one below the other; `prompt` counts from 0."""
        frames = {number: one.to_pandas() for number, one in enumerate(self)}  # type: ignore[attr-defined]
        pandas = report_library("pandas")
        return pandas.concat(frames, names=["prompt"]).reset_index("prompt").reset_index(drop=True)

    def _repr_html_(self) -> str:
        return "\n".join(one._repr_html_() for one in self)  # type: ignore[attr-defined]
