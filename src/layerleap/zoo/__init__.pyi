from .catalog import (
    TEXT_NAMES as TEXT_NAMES,
    Entry as Entry,
    cache_root as cache_root,
    inventory as inventory,
)
from .download import fetch as fetch
from .reviews import SHORT as SHORT, is_held_out as is_held_out
from .small_lm import token_stream as token_stream
from .training_loop import warmup_cosine as warmup_cosine
