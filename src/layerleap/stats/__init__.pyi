from .collect import collect as collect, finish as finish, merge as merge
from .fit_statistics import FitStatistics as FitStatistics
from .moments import Moments as Moments, load_moments as load_moments, save_moments as save_moments
from .saved_states import (
    SavedStates as SavedStates,
    StateFile as StateFile,
    StateWriter as StateWriter,
)
from .tensor_file import TensorFile as TensorFile
