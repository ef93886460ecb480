"""Statistics of hidden states: collected in one pass, in constant memory, mergeable.

    tally = collect(model, "wikipedia")     one pass over the text
    tally.fit.xx(3)                         sums over all rows, float64

The moments hold everything a linear map needs. Runs can be resumed from a checkpoint, split into
shards (`merge` adds them up) or distributed with torchrun.
"""

from layerleap.stats.collect import collect, finish, merge
from layerleap.stats.moments import Moments, load_moments, save_moments
from layerleap.stats.saved_states import SavedStates, StateFile
from layerleap.stats.tally import Tally

__all__ = [
    "Moments", "SavedStates", "StateFile", "Tally", "collect", "finish", "load_moments", "merge",
    "save_moments",
]  # fmt: skip
