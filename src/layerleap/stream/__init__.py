"""Stream: text, images or speech in; batches with chosen positions out."""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
