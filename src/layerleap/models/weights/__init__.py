"""A verified view of a model's weights, in the basis of the residual stream.

In: a wrapped model. Out: the neurons of its FFNs (coefficients, keys, values), the heads of its
attention (queries, keys, values, outputs), and its embeddings; or `ModelRefused` with the reason.

Nothing is taken from names or classes: matrices are those whose recorded inputs and outputs obey
the equations of an FFN or of attention, on a probe, when they are first asked for.
"""

import lazy_loader

# The public names are those of the stub beside this file, each loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
