"""Statistics of hidden states: collected in one pass, in constant memory, mergeable.

    stats = collect(model, "wikipedia")     one pass over the text
    stats.fit.xx(3)                         sums over all rows, float64

The moments hold everything a linear map needs. Runs can be resumed from a checkpoint, split into
shards (`merge` adds them up) or distributed with torchrun.
"""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
