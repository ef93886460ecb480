"""Stitching: the first blocks of one model, a kernel, the last blocks of another."""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
