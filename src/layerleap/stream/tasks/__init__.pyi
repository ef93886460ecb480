from .draw import Draw as Draw, draw as draw, still_right as still_right
from .load import load as load, names as names, parse_labels as parse_labels
from .prompts import (
    EncodedTask as EncodedTask,
    Piece as Piece,
    encode as encode,
    require_decoder as require_decoder,
)
from .task import Example as Example, Task as Task
