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
        return [result.to_dict() for result in self]  # type: ignore[attr-defined]  # all can

    def to_pandas(self) -> Any:
        """The data frames of all results, one below the other; `prompt` counts from 0."""
        pandas = report_library("pandas")
        frames = {n: result.to_pandas() for n, result in enumerate(self)}  # type: ignore[attr-defined]
        return pandas.concat(frames, names=["prompt"]).reset_index("prompt").reset_index(drop=True)

    def _repr_html_(self) -> str:
        return "\n".join(result._repr_html_() for result in self)  # type: ignore[attr-defined]
