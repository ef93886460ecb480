from .kernel import (
    LayerPair as LayerPair,
    embedding_kernel as embedding_kernel,
    fit_kernels as fit_kernels,
    shared_tokens as shared_tokens,
)
from .kinds import kind_named as kind_named, register_kind as register_kind
from .linear import (
    FitReport as FitReport,
    LinearMap as LinearMap,
    LowRankMap as LowRankMap,
    TunedMap as TunedMap,
    solve as solve,
)
from .map import IdentityMap as IdentityMap, Map as Map
from .map_settings import Tuning as Tuning, check_solving as check_solving
from .tune import summary as summary, tune_maps as tune_maps
