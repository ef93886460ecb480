from .collect import collect as collect, finish as finish, merge as merge
from .moments import Moments as Moments, load_moments as load_moments, save_moments as save_moments
from .saved_states import (
    SavedStates as SavedStates,
    StateFile as StateFile,
    StateWriter as StateWriter,
)
from .tally import Tally as Tally
from .tensor_file import TensorFile as TensorFile
