from .intervals import (
    ANY as ANY,
    DIFFERENCE as DIFFERENCE,
    POSITIVE as POSITIVE,
    SHARE as SHARE,
    Bounds as Bounds,
    Documents as Documents,
    all_but_one as all_but_one,
    ends as ends,
    finite as finite,
    freedom as freedom,
    groups_of as groups_of,
    jackknife as jackknife,
    mean_interval as mean_interval,
    nested_means as nested_means,
    nested_ratios as nested_ratios,
    percentiles as percentiles,
    wilson as wilson,
)
from .lens import chunks as chunks
from .map_errors import GROUPS as GROUPS, MapErrors as MapErrors
from .metrics import Reference as Reference, lasting as lasting
from .probes.cells import CellSampling as CellSampling
from .probes.scores import ProbeScores as ProbeScores, score_probe as score_probe
from .probes.task import (
    States as States,
    TaskProbe as TaskProbe,
    require_aligned as require_aligned,
)
from .random_walks import RandomWalk as RandomWalk, RandomWalks as RandomWalks
from .reader import score_table as score_table
from .readings import saturation_layers as saturation_layers
from .saturation import (
    Saturation as Saturation,
    SaturationObserver as SaturationObserver,
    finite_top as finite_top,
    require_ranks as require_ranks,
)
from .scores import Scores as Scores, score as score
