from .kernel import (
    LayerPair as LayerPair,
    embedding_kernel as embedding_kernel,
    fit_kernels as fit_kernels,
    shared_tokens as shared_tokens,
)
from .linear import FitReport as FitReport, solve as solve
from .settings import Tuning as Tuning, check_solving as check_solving
from .tuned import summary as summary, tune_maps as tune_maps
