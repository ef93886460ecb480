"""Every exception that layerleap raises on purpose.

A message is one line: what went wrong, what was expected, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, get_args


class LayerleapError(Exception):
    """Base class of all errors below; the command line prints one as a single red line."""


class ModelRefused(LayerleapError):
    """A model failed a law of the self-check, so it is not wrapped."""


class UnknownModel(LayerleapError):
    """There is no model with that name, folder or file."""


class BadText(LayerleapError):
    """A text source is missing, empty, unreadable or too small."""


class NothingToFit(BadText):
    """A text source has no position to fit on."""


class BadMedia(LayerleapError):
    """An image or sound is missing, unreadable, or has the wrong shape or rate."""


class BadSettings(LayerleapError):
    """A setting is out of range: a layer that does not exist, rank 0."""


class UnknownArgument(BadSettings, TypeError):
    """A function was given an argument that it does not have."""


class TooFewRows(BadText, BadSettings):
    """A text source is too small for the settings."""


class NotFinite(LayerleapError):
    """States or their sums are NaN or infinite."""


class BadArtifact(LayerleapError):
    """A saved file is truncated, corrupted, or has another format."""


class WrongModel(LayerleapError):
    """A bank or statistics belong to another model."""


class CannotFetch(LayerleapError):
    """A package, file or library is not available."""


class CannotWrite(LayerleapError):
    """No space, no permission, or a target that must not be replaced."""


class LayerleapWarning(UserWarning):
    """Base class of all warnings below; the command line prints one as a single line."""


class FewRowsWarning(LayerleapWarning):
    """Maps were fitted on too few rows for plain least squares."""


class HookedModelWarning(LayerleapWarning):
    """Others have hooked a model, so it is decoded by transformers' own loop."""


class WeakBankWarning(LayerleapWarning):
    """Some maps of a bank read worse than the logit lens does without any map."""


class OtherModelWarning(LayerleapWarning):
    """A model is read through a bank that was fitted on another one, as was asked for."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_choice(value: object, choices: Any, name: str) -> None:
    """Raise a `BadSettings` that lists the choices and the nearest one, unless `value` is one.

    Args:
        value: what the caller passed.
        choices: a `Literal` type or an iterable of names.
        name: the name of the setting.
    """
    known: Iterable[object] = get_args(choices) or tuple(choices)
    if value in known:
        return
    hint = did_you_mean(value, known)
    raise BadSettings(f"{name} is {value!r}; expected one of {', '.join(map(repr, known))}{hint}")


def did_you_mean(value: object, known: Iterable[object]) -> str:
    """The known name that a mistyped one resembles, as the end of a sentence; empty if none."""
    nearest = get_close_matches(str(value).lower(), map(str, known), n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
