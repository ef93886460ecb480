from .discovery.parts import KINDS as KINDS, replaceable as replaceable
from .discovery.sites import Site as Site
from .hooks.attention import (
    AttentionFunction as AttentionFunction,
    attention_wrapped_by as attention_wrapped_by,
)
from .hooks.capture import Capture as Capture
from .hooks.edit import Edit as Edit
from .hooks.recording import Recording as Recording, record as record
from .inputs import padded as padded
from .untrained import untrained_blocks as untrained_blocks
