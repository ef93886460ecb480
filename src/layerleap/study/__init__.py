"""Study: the engine behind `ll.studies`, and what an experiment of your own is made of."""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
