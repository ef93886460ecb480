"""Top-k attention: every query attends only to the k keys with the highest scores.

attention      the function: exact scores in chunks of queries, selection, gradients
blocks         which rows and heads are computed at a time
masks          which keys a query sees, and what is added to its scores
products       products of queries with the selected keys and values only
pages          keys that can matter for one query, from summaries of pages of a long cache
interface      the function as transformers calls it, and `topk_attention`, which registers it
topk_settings  k for a model, a block or a head, and the other options, checked

`ll.edits.TopKAttention` is the edit that puts it in force on a wrapped model.
"""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
