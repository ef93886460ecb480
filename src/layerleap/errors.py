"""Every exception that layerleap raises on purpose.

    LayerleapError
    |-- ModelRefused      a model broke a law of the self-check, so it is not wrapped
    |-- UnknownModel      no model of that name, folder or file
    |-- BadText           a text source is missing, empty, unreadable or too small
    |   `-- NothingToFit  not one position of it is there to fit on
    |-- BadMedia          an image or a sound is missing, unreadable, or of the wrong shape or rate
    |-- BadSettings       a setting outside its meaning: a layer that does not exist, rank 0
    |-- NotFinite         NaN or infinite states, or sums of them
    |-- BadArtifact       a saved file is truncated, tampered with, or of another format
    |-- WrongModel        a bank or statistics that belong to another model
    |-- CannotFetch       a package, file or library could not be had
    `-- CannotWrite       no space, no permission, or a target that must not be replaced

A message says what was found, what was wanted and what to do next, on one line.
"""


class LayerleapError(Exception):
    """Base of all the errors below; the command line turns one into a single red line."""


class ModelRefused(LayerleapError):
    """A model broke a law of the self-check."""


class UnknownModel(LayerleapError):
    """No model of that name, folder or file."""


class BadText(LayerleapError):
    """A text source is missing, empty, unreadable or too small."""


class NothingToFit(BadText):
    """Not one position of a text is there to fit on."""


class BadMedia(LayerleapError):
    """An image or a sound is missing, unreadable, or of the wrong shape or rate."""


class BadSettings(LayerleapError):
    """A setting outside its meaning."""


class NotFinite(LayerleapError):
    """NaN or infinite states, or sums of them."""


class BadArtifact(LayerleapError):
    """A saved file is truncated, tampered with, or of another format."""


class WrongModel(LayerleapError):
    """A bank or statistics that belong to another model."""


class CannotFetch(LayerleapError):
    """A package, file or library could not be had."""


class CannotWrite(LayerleapError):
    """No space, no permission, or a target that must not be replaced."""
